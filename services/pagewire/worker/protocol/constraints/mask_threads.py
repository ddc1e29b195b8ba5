"""The threads that compile grammars and compute masks, for all streams of a worker."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

from llguidance import LLExecutor, LLMatcher

from pagewire.worker.protocol.constraints.grammars import Grammars
from pagewire.worker.protocol.constraints.mask_table import MaskTable
from pagewire.worker.protocol.constraints.token_bans import Words
from pagewire.worker.protocol.queue_thread import QueueThread

# Grammars that are compiled at the same time, so that a slow one delays few others.
COMPILERS = 4
# For so many tokens other threads are woken: one takes 1 to 2 us, and the interpreter's lock.
MANY = 48


class MaskThreads:
    """Runs the work of masks beside the launcher. No thread starts before the first constraint."""

    def __init__(
        self, grammars: Grammars, table: MaskTable, on_error: Callable[[BaseException], None]
    ) -> None:
        """`on_error` is called when a thread fails; it should end the process."""
        self.grammars = grammars
        self.table = table
        self._on_error = on_error

    def compile(self, call: Callable[[], None]) -> None:
        """Queues a call that may compile a grammar; it must not raise."""
        self._compilers.submit(partial(self._run, call))

    def post(self, call: Callable[[], None]) -> None:
        """Queues a call; these run one after another."""
        self._masks.post(call)

    def consume(self, tokens: list[tuple[LLMatcher, int]]) -> list[bool]:
        """Gives matchers their next tokens; says which of these they allow."""
        if len(tokens) < MANY:
            return [matcher.consume_token(token) for matcher, token in tokens]
        return self._executor.consume_token_par(tokens)

    def fill(self, matchers: Sequence[tuple[LLMatcher, int]], masks: Words) -> None:
        """Computes the masks of matchers into rows of `masks [rows, words]`.

        If there are several, it works in parallel.
        """
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            mask = masks[row]
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return
        rows, words = masks.shape
        self._executor.unsafe_compute_mask_ptr(
            list(matchers), masks.ctypes.data, words * masks.itemsize, rows
        )

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._on_error(error)

    @cached_property
    def _masks(self) -> QueueThread:
        return QueueThread("masks", self._on_error)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _compilers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(COMPILERS, "grammars")
