"""How many drafts a sequence gets in its next step.

A draft adds a row to this step. If it is right, it saves the sequence's row in a later step. A step
of n rows takes the time of about `FIXED_ROWS + n` rows, so each row's share of a step is the time
of `(FIXED_ROWS + n) / n` rows. A draft pays if it is right with a probability above
`n / (FIXED_ROWS + n)`; `ROUND_COST` raises that bound. A draft of a draft model also costs a step
of that model, which is counted as a part of the whole step's time.
"""

# Measured with the embedded model on a CPU: 4.5 ms for one row, 0.45 ms for each further row. With
# a larger model, a further row costs less in comparison to reading the weights.
FIXED_ROWS = 9
# How much more a draft costs because sampling checks the drafts of a sequence one after the other.
ROUND_COST = 1.15
# Each result reduces the weight of earlier ones by this factor.
MEMORY = 0.8
# The rate before the first results counts as much as the results of this many drafts.
TRIED_BEFORE = 2.0
# A sequence without drafts tries one after this many steps, then after twice as many, and so on.
FIRST_PAUSE = 16
LONGEST_PAUSE = 256


class DraftLength:
    """The draft length of one drafter for one sequence, from the load and its earlier drafts."""

    __slots__ = ("_cost", "_left", "_most", "_pause", "_right", "_tried")

    def __init__(self, most: int, right: float = 0.5, cost: float = 0.0) -> None:
        """A length of at most `most`.

        Args:
            most: the most drafts in a step.
            right: the part of the drafts that counts as right before the first results.
            cost: the time that it takes to make a draft, as a part of a step's time.
        """
        self._most = most
        self._cost = cost
        self._tried, self._right = TRIED_BEFORE, right * TRIED_BEFORE
        # Steps until the next trial, and the length of the next pause.
        self._left = self._pause = FIRST_PAUSE

    @property
    def rate(self) -> float:
        """The part of the latest drafts that was right; drafts after a wrong one do not count."""
        return self._right / self._tried

    def next(self, rows: int) -> int:
        """The most drafts in a step of `rows` decode rows.

        Call it once for each step in which the drafter may make drafts: it counts the steps until
        the next trial.
        """
        needed = ROUND_COST * rows / (FIXED_ROWS + rows) + self._cost
        each = self.rate
        length, right = 0, each
        while length < self._most and right > needed:
            length, right = length + 1, right * each
        if length:
            return length
        self._left -= 1
        if self._left:
            return 0
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._left = self._pause
        return 1

    def observe(self, drafted: int, accepted: int) -> None:
        """Takes a step's result: `accepted` of its `drafted` drafts, at least 1, were right."""
        # Drafts after the first wrong one were not checked.
        self._tried = MEMORY * self._tried + min(accepted + 1, drafted)
        self._right = MEMORY * self._right + accepted
        if accepted:
            self._left = self._pause = FIRST_PAUSE
