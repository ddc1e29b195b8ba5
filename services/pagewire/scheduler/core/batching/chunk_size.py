"""How many prompt tokens a step may compute beside decodes, to keep within a time per step."""

# The weight of a measured step falls by this factor with each later one.
DECAY = 0.9
MIN_TOKENS = 16


class ChunkSize:
    """Adapts the tokens of prefill chunks to a target for the duration of a step.

    The model is a line, duration = base + cost * tokens: base is the time of the decodes, cost the
    time of a prompt token. It is fitted by least squares to the steps that had decodes. Base and
    cost drift with the batch and its lengths, so older steps count less. No line can be fitted
    while all chunks have had the same size: then duration is assumed to be proportional to size,
    which errs towards small chunks.
    """

    __slots__ = ("_n", "_target", "_x", "_xx", "_xy", "_y", "tokens")

    def __init__(self, target_us: int) -> None:
        """`target_us` is the longest that a step with decodes should take, in microseconds."""
        self._target = target_us
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        # The most prompt tokens of a step that has decodes.
        self.tokens = MIN_TOKENS

    def observe(self, prefilled: int, duration_us: int) -> None:
        """Takes the duration of a step that computed `prefilled` prompt tokens beside decodes."""
        if duration_us <= 0:
            return
        sums = (1.0, prefilled, duration_us, prefilled**2, prefilled * duration_us)
        held = (self._n, self._x, self._y, self._xx, self._xy)
        self._n, self._x, self._y, self._xx, self._xy = (
            DECAY * old + new for old, new in zip(held, sums, strict=True)
        )
        if prefilled:
            self.tokens = max(MIN_TOKENS, self._largest(prefilled, duration_us))

    def _largest(self, prefilled: int, duration_us: int) -> int:
        """The chunk that the target allows, at most twice the one just measured."""
        spread = self._n * self._xx - self._x**2
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-6 else 0.0
        if slope <= 0:
            return int(prefilled * min(2.0, self._target / duration_us))
        base = (self._y - slope * self._x) / self._n
        return min(2 * prefilled, int((self._target - base) / slope))
