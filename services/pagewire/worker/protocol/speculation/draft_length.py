"""How many drafts a sequence gets in its next step.

A draft costs the time of a row in this step, and saves the sequence's row in a later one if it is
right. A step of n rows takes the time of about `FIXED_ROWS + n` rows, so a row's share of it is
`(FIXED_ROWS + n) / n` rows. So a draft pays if it is right with a probability above
`n / (FIXED_ROWS + n)`, and a little more for the further rounds of sampling. The draft of a draft
model costs a step of that model, too: a part of the whole step's time.
"""

# Measured with the embedded model on a CPU: 4.5 ms for a row, 0.45 ms for each further one. Of a
# larger model a row costs less, beside reading the weights.
FIXED_ROWS = 9
# What sampling place by place adds to a draft's cost.
ROUND_COST = 1.15
# A result counts as much as all that come after the next four.
MEMORY = 0.8
# Before the first results: so many drafts.
TRIED_BEFORE = 2.0
# A sequence without drafts tries one after so many steps, then after twice as many, and so on.
FIRST_PAUSE = 16
LONGEST_PAUSE = 256


class DraftLength:
    """The draft length of one drafter for one sequence, by the load and by its earlier drafts."""

    __slots__ = ("_cost", "_left", "_most", "_pause", "_right", "_tried")

    def __init__(self, most: int, right: float = 0.5, cost: float = 0.0) -> None:
        """`right`: which part of the drafts counts as right before the first results. `cost`: the
        time that it takes to make a draft, as a part of the time of a step."""
        self._most = most
        self._cost = cost
        self._tried, self._right = TRIED_BEFORE, right * TRIED_BEFORE
        # Steps until the next trial, and the length of the next pause.
        self._left = self._pause = FIRST_PAUSE

    @property
    def rate(self) -> float:
        """The part of the latest drafts that were right, without those behind a wrong one."""
        return self._right / self._tried

    def next(self, rows: int) -> int:
        """The most drafts in a step of so many decode rows; to be called once for each step
        with such drafts, or that may have some."""
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
        """Of `drafted` tokens of a step, at least 1, `accepted` were right."""
        # Drafts behind the first wrong one say nothing.
        self._tried = MEMORY * self._tried + min(accepted + 1, drafted)
        self._right = MEMORY * self._right + accepted
        if accepted:
            self._left = self._pause = FIRST_PAUSE
