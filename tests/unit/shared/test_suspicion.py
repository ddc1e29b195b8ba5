"""Losses that are evidence that a request crashes processes."""

from hypothesis import given
from hypothesis import strategies as st

from pagewire.suspicion import SURVIVAL_FACTOR, SURVIVAL_SECONDS, Loss, Suspicion


def tried(suspicion: Suspicion, at: float, took: float = 0.1, ended: bool | None = True) -> Loss:
    """A loss while the request was alone."""
    loss = Loss("process", ended)
    suspicion.add_loss(loss)
    suspicion.add_trial(loss, at, took)
    return loss


def test_losses_beside_other_requests_confirm_nothing() -> None:
    suspicion = Suspicion()
    for _ in range(100):
        suspicion.add_loss(Loss("process", True))
    assert suspicion.losses == 100
    assert not suspicion.confirmed


def test_two_processes_that_ended_in_trials_confirm_it() -> None:
    suspicion = Suspicion()
    tried(suspicion, at=10.0)
    assert not suspicion.confirmed
    tried(suspicion, at=20.0)
    assert suspicion.confirmed


def test_a_loss_of_the_connection_only_does_not_count() -> None:
    suspicion = Suspicion()
    tried(suspicion, at=10.0)
    loss = tried(suspicion, at=20.0, ended=None)
    assert suspicion.losses == 2
    assert not suspicion.confirmed
    assert not suspicion.may_be_tried(0.0, 100.0), "it is not known yet what has happened"
    loss.resolve("process")
    assert suspicion.losses == 1
    assert not suspicion.confirmed
    loss.resolve("another")
    assert suspicion.confirmed


def test_a_process_without_a_name_counts_as_ended() -> None:
    loss = Loss("", None)
    loss.resolve("")
    assert loss.ended


def test_between_trials_the_process_must_live_without_it() -> None:
    suspicion = Suspicion()
    assert suspicion.may_be_tried(lived_since=10.0, now=10.0)
    tried(suspicion, at=10.0, took=0.1)
    assert not suspicion.may_be_tried(0.0, 10.0 + 0.9 * SURVIVAL_SECONDS)
    assert suspicion.may_be_tried(0.0, 10.0 + SURVIVAL_SECONDS)
    assert not suspicion.may_be_tried(12.0, 12.0 + 0.9 * SURVIVAL_SECONDS)
    assert suspicion.may_be_tried(12.0, 12.0 + SURVIVAL_SECONDS)
    slow = Suspicion()
    tried(slow, at=10.0, took=5.0)
    assert not slow.may_be_tried(0.0, 10.0 + 4.9 * SURVIVAL_FACTOR)
    assert slow.may_be_tried(0.0, 10.0 + 5.0 * SURVIVAL_FACTOR)


@given(
    st.lists(st.sampled_from(["ended alone", "cut alone", "ended beside others", "token", "other"]))
)
def test_other_losses_and_progress_reset_the_trials(events: list[str]) -> None:
    """Two crashed trials confirm it, unless progress or another loss lies between them."""
    suspicion, in_a_row = Suspicion(), 0
    for number, event in enumerate(events):
        if event == "ended alone":
            tried(suspicion, at=float(number))
            in_a_row += 1
        elif event == "cut alone":
            tried(suspicion, at=float(number), ended=False)
        elif event == "ended beside others":
            suspicion.add_loss(Loss("process", True))
        elif event == "token":
            suspicion.clear()
            in_a_row = 0
        else:
            suspicion.discard_trials()
            in_a_row = 0
        assert suspicion.confirmed == (in_a_row >= 2)
