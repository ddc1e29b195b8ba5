"""Evidence that one request crashes the processes that run it. The caller passes the time.

A gateway collects evidence for requests whose schedulers were lost, a scheduler for sequences whose
workers were lost. A suspected request gets a trial: it runs alone in a process. The suspicion is
confirmed when two processes ended during trials, and a process lived without the request between
them.
"""

from dataclasses import dataclass, field

# Processes that must have ended during a trial until the request fails.
MAX_CRASHES_ALONE = 2
# Before the next trial, a process must have lived without the request: for this many seconds, and
# for this many times the duration of the last trial.
SURVIVAL_SECONDS = 2.0
SURVIVAL_FACTOR = 2.0
# A lost process that has not answered again after this time counts as ended.
LOSS_TIMEOUT_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Loss:
    """The stream to a process broke: the process ended or is stuck, or only its connection broke.

    `ended` is None until this is known. A loss counts unless the process is known to live.
    """

    instance: str = ""
    ended: bool | None = None

    def resolve(self, instance: str) -> None:
        """The peer answers again, as process `instance`; "" if no answer is known."""
        self.ended = not instance or instance != self.instance


@dataclass(frozen=True, slots=True)
class Trial:
    """A loss while the request ran alone: its time, and the seconds since the request's start."""

    loss: Loss
    at: float
    took: float


@dataclass(slots=True, eq=False)
class Suspicion:
    """The losses of one request in a row, without progress of the request in between."""

    _losses: list[Loss] = field(default_factory=list)
    _trials: list[Trial] = field(default_factory=list)

    @classmethod
    def from_report(cls, losses: int, took: list[float], now: float) -> "Suspicion":
        """The suspicion that another process reports when it returns the request: how many
        processes ended, and the durations of the trials among them."""
        made = cls([Loss(ended=True) for _ in range(losses)])
        made._trials = [
            Trial(loss, now, seconds) for loss, seconds in zip(made._losses, took, strict=False)
        ]
        return made

    @property
    def losses(self) -> int:
        """Processes lost with the request, less those that are known to live."""
        return sum(loss.ended is not False for loss in self._losses)

    @property
    def crashed_trials(self) -> list[Trial]:
        """The trials in which the process ended."""
        return [trial for trial in self._trials if trial.loss.ended]

    @property
    def confirmed(self) -> bool:
        """Whether the request crashes processes by this evidence, and must not run again."""
        return len(self.crashed_trials) >= MAX_CRASHES_ALONE

    @property
    def unresolved(self) -> bool:
        """Whether the outcome of a trial is unknown; until then the request must not run."""
        return any(trial.loss.ended is None for trial in self._trials)

    def add_loss(self, loss: Loss) -> None:
        """A process was lost while it ran the request."""
        if loss not in self._losses:  # the sequences of a beam search report the same loss
            self._losses.append(loss)

    def add_trial(self, loss: Loss, at: float, took: float) -> None:
        """The loss happened while the request ran alone, `took` seconds after the start."""
        self._trials.append(Trial(loss, at, took))

    def discard_trials(self) -> None:
        """A process without the request was lost, too: the losses may have another cause."""
        self._trials.clear()

    def clear(self) -> None:
        """The request made progress, or a process survived a trial."""
        self._losses.clear()
        self._trials.clear()

    def may_be_tried(self, lived_since: float, now: float) -> bool:
        """Whether a trial in a process that has lived without the request since `lived_since`
        would be evidence."""
        if self.unresolved:
            return False
        crashed = self.crashed_trials
        if not crashed:
            return True
        last = crashed[-1]
        needed = max(SURVIVAL_SECONDS, SURVIVAL_FACTOR * last.took)
        return now - max(lived_since, last.at) >= needed
