"""Telling that something stands still that ought to move."""


class Stall:
    """Looks again and again at a number that grows with every move.

    It counts looks and not time: whoever was stopped or starved himself has looked less often too,
    and so does not take his own absence for that of others.
    """

    __slots__ = ("_looks", "_patience", "_seen")

    def __init__(self, patience: int) -> None:
        """`patience` is how many looks in a row without a move are a stall."""
        self._patience = patience
        self._looks = 0
        self._seen: int | None = None

    def look(self, moves: int, waiting: bool = True) -> bool:
        """Whether it has stalled; while nothing is `waiting` for a move, it may stand still."""
        self._looks = self._looks + 1 if waiting and moves == self._seen else 0
        self._seen = moves
        return self._looks >= self._patience
