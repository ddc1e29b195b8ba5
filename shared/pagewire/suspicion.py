"""What is known against a request that may take processes down. Pure: times are given.

Gateways keep it of requests whose schedulers were lost, schedulers of sequences whose workers were.
"""

from dataclasses import dataclass, field

# A request is guilty if so many processes ended while it was alone in them.
ENDS_ALONE = 2
# Between two of them the next process must have lived without it for so long at least, and for so
# many times as long as the trial took.
CONTROL_SECONDS = 2.0
CONTROL_FACTOR = 2.0
# A process that does not answer for so long after it was lost is taken to have ended.
EXPLAINED_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Loss:
    """The stream to a process broke: it may have ended (or stand still), or only its connection.

    `ended` is None until that is known. A loss counts unless the process is known to live.
    """

    instance: str = ""
    ended: bool | None = None

    def met(self, instance: str) -> None:
        """The peer is back, with the same process or another."""
        self.ended = not instance or instance != self.instance


@dataclass(frozen=True, slots=True)
class Trial:
    """A loss while the request was alone: when, and how many seconds after it had come."""

    loss: Loss
    at: float
    took: float


@dataclass(slots=True, eq=False)
class Suspicion:
    """The losses of one request in a row, without progress of it in between."""

    _losses: list[Loss] = field(default_factory=list)
    _trials: list[Trial] = field(default_factory=list)

    @classmethod
    def told(cls, losses: int, took: list[float], now: float) -> "Suspicion":
        """As another process has it that gave the request back: processes that ended, and how long
        those trials took that were among them."""
        made = cls([Loss(ended=True) for _ in range(losses)])
        made._trials = [
            Trial(loss, now, seconds) for loss, seconds in zip(made._losses, took, strict=False)
        ]
        return made

    @property
    def losses(self) -> int:
        """Processes that may have been lost through it."""
        return sum(loss.ended is not False for loss in self._losses)

    @property
    def trials(self) -> list[Trial]:
        """The processes that ended while it was alone in them."""
        return [trial for trial in self._trials if trial.loss.ended]

    @property
    def guilty(self) -> bool:
        """Whether processes without it lived while those that had it alone ended."""
        return len(self.trials) >= ENDS_ALONE

    @property
    def undecided(self) -> bool:
        """Whether it must not be tried again before a loss has been explained."""
        return any(trial.loss.ended is None for trial in self._trials)

    def note(self, loss: Loss) -> None:
        """A process was lost with it."""
        if loss not in self._losses:  # those of a search have one in common
            self._losses.append(loss)

    def note_alone(self, loss: Loss, at: float, took: float) -> None:
        """The same loss, `took` seconds after it had come and while nothing else was there."""
        self._trials.append(Trial(loss, at, took))

    def lost_without(self) -> None:
        """A process was lost that did not have it: the losses may be somebody else's."""
        self._trials.clear()

    def clear(self) -> None:
        """It has got on, or a process has lived with it."""
        self._losses.clear()
        self._trials.clear()

    def may_be_tried(self, lived_since: float, now: float) -> bool:
        """Whether a process that has lived without it since then would prove something."""
        if self.undecided:
            return False
        ended = self.trials
        if not ended:
            return True
        last = ended[-1]
        needed = max(CONTROL_SECONDS, CONTROL_FACTOR * last.took)
        return now - max(lived_since, last.at) >= needed
