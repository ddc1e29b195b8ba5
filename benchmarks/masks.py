"""CPU time of the masks of a schema of ten fields.

Along random outputs: `whole` is one matcher of all tokens, `worker` the two that a worker has of a
sequence. Both must give the same masks.

    python benchmarks/masks.py --tokenizer DIR --vocabulary 151936

With `--rows`, from the tokens of a step to the masks of the next one, as a worker does it: `own`
with the masks of each sequence alone, `shared` with those that others have computed too. They take
turns, a step each, along the same outputs: drawn at random from the masks, or valid ones of usual
words. `serial` is the time of the mask thread without what it leaves to other threads, `parallel`
the time of these, `later` that of the thread once the masks are ready.

    python benchmarks/masks.py --tokenizer DIR --vocabulary 151936 --rows 64 --threads 2
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Condition
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.bench.schemas import wide_schema
from pagewire.scheduler.structured.grammars import WHITESPACE
from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import Grammars, compile_grammar
from pagewire.worker.protocol.constraints.mask_cache import MaskCache
from pagewire.worker.protocol.constraints.mask_table import MaskTable
from pagewire.worker.protocol.constraints.mask_threads import MaskThreads
from pagewire.worker.protocol.constraints.slot_masks import SlotMasks

LISTS = {"type": "array", "items": wide_schema(10), "minItems": 50}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "service",
    "returns",
    "value",
    "for",
    "client",
]


class Sequence:
    """What holds a matcher."""


class OwnMasks(Grammars):
    """Grammars whose sequences share no masks."""

    def cache(self, grammar: str) -> MaskCache | None:
        return None


class Noting(Condition):
    """Calls a function when it notifies."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def notify_all(self) -> None:
        self._call()
        super().notify_all()


class Worker:
    """The masks of one stream, computed by the caller's thread and those of an executor."""

    def __init__(self, grammars: Grammars, grammar: str, rows: int, threads: int) -> None:
        self.words = np.zeros((rows, grammars.words), np.int32)
        self._others = 0.0  # CPU seconds that the caller's thread spent for other threads' part
        self._ready = 0.0
        mask_threads = MaskThreads(grammars, MaskTable(self.words), _fail)
        mask_threads.__dict__["_executor"] = LLExecutor(threads)
        for name in ("consume", "fill"):
            setattr(mask_threads, name, self._timed(getattr(mask_threads, name)))
        self._masks = SlotMasks(mask_threads)
        self._rows = np.arange(rows, dtype=np.int32)
        none = np.empty(0, np.int32)
        for slot in range(rows):
            self._masks.start(slot, Constraint(grammar, "", (0,)), none, none)
        self._now = self._masks.of_step(self._rows, self._rows, np.zeros(rows, np.int64))
        while any(each.sequence is None for each in self._now.masked):
            time.sleep(0.01)
        mask_threads.__dict__["post"] = lambda call: call()
        self._masks._changed = Noting(self._note)

    def advance(self, tokens: np.ndarray, index: int) -> dict[str, float]:
        """CPU seconds by their kind."""
        self._others = 0.0
        began, all_began = time.thread_time(), time.process_time()
        self._now.advance(tokens)
        ended, all_ended = time.thread_time(), time.process_time()
        self._now = self._masks.of_step(self._rows, self._rows, np.full(len(self._rows), index))
        self._now.wait()
        assert not self._now.failures
        return {
            "serial": self._ready - began - self._others,
            "parallel": all_ended - all_began - (ended - began) + self._others,
            "later": ended - self._ready,
        }

    def _note(self) -> None:
        self._ready = time.thread_time()

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.thread_time()
            result = call(*args)
            self._others += time.thread_time() - began
            return result

        return run


def _fail(error: BaseException) -> None:
    raise error


def valid_output(seed: int) -> str:
    """A long output of `LISTS`."""
    draw = random.Random(seed)
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: " ".join(draw.choices(WORDS, k=2))[:12],
        lambda: draw.randint(0, 9999),
        lambda: draw.sample(range(100), draw.randint(0, 3)),
        lambda: draw.choice(("red", "green", "blue")),
        lambda: draw.random() < 0.5,
    )
    items = [{f"field_{i}": kinds[i % 5]() for i in range(10)} for _ in range(draw.randint(50, 60))]
    return json.dumps(items)


def steps(args: argparse.Namespace, path: str, grammar: str) -> dict[str, Any]:
    """The times of steps, by output and by whether sequences share masks."""
    figures: dict[str, Any] = {}
    for output in ("random", "valid"):
        workers, times = {}, defaultdict(list)
        for kind, of_kind in (("own", OwnMasks), ("shared", Grammars)):
            grammars = of_kind(LLTokenizer(path, n_vocab=args.vocabulary, eos_token=0))
            workers[kind] = Worker(grammars, grammar, args.rows, args.threads)
        texts = [grammars.tokenizer.tokenize_str(valid_output(i)) for i in range(args.rows)]
        draw = np.random.default_rng(0)
        for step in range(args.tokens):
            masks = workers["own"].words
            assert (masks == workers["shared"].words).all()
            bits = [np.unpackbits(mask.view(np.uint8), bitorder="little") for mask in masks]
            if output == "random":
                tokens = [draw.choice(np.flatnonzero(each)) for each in bits]
            else:
                tokens = [text[step] for text in texts]
            for kind in ("own", "shared") if step % 2 else ("shared", "own"):
                spent = workers[kind].advance(np.array(tokens, np.int32), step + 1)
                if step >= args.tokens // 3:  # before, lexers and masks are new
                    for part, seconds in spent.items():
                        times[kind, part].append(1e3 * seconds)
        for (kind, part), each in times.items():
            figures[f"{args.rows} rows/{args.threads} threads/{output}/{kind}/{part}"] = {
                "mean": {"ms": np.mean(each)},
                "p95": {"ms": np.percentile(each, 95)},
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--outputs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="of each output")
    parser.add_argument("--rows", type=int, help="of a step")
    parser.add_argument("--threads", type=int, default=1, help="besides the mask thread, for rows")
    parser.add_argument("--output", type=Path, help="write the figures as rows")
    args = parser.parse_args()
    path = str(tokenizer_file(args.tokenizer))
    grammars = Grammars(LLTokenizer(path, n_vocab=args.vocabulary, eos_token=0))
    options = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(LISTS), overrides=options)
    if args.rows:
        report(steps(args, path, grammar), args.output)
        return
    whole = compile_grammar(grammars.tokenizer, grammar)
    draw, times = np.random.default_rng(0), defaultdict(list)
    expected, found = np.empty((2, grammars.words), np.int32)
    for number in range(args.outputs + 1):
        one, (other, _) = whole.deep_copy(), grammars.matcher(grammar, Sequence())
        for step in range(args.tokens):
            # In turns: the second finds in the cache what the first has read.
            for kind in ("whole", "worker") if step % 2 else ("worker", "whole"):
                began = time.thread_time()
                if kind == "whole":
                    one.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
                else:
                    other.current.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
                    other.complete(found)
                taken = time.thread_time() - began
                place = "elsewhere" if other.current is other.whole else "within strings"
                if number:  # the first output fills caches
                    times[kind, place].append(taken)
            assert (expected == found).all()
            allowed = np.flatnonzero(np.unpackbits(found.view(np.uint8), bitorder="little"))
            token = int(draw.choice(allowed))
            assert one.consume_token(token)
            assert other.consume(token)
    figures = {
        f"{kind} {place}": {
            "count": len(each),
            "mean": {"us": 1e6 * np.mean(each)},
            "p50": {"us": 1e6 * np.percentile(each, 50)},
            "p99": {"us": 1e6 * np.percentile(each, 99)},
        }
        for (kind, place), each in times.items()
    }
    report(figures, args.output)


def report(figures: dict[str, Any], output: Path | None) -> None:
    """Prints figures, and writes them as rows if there is an `output`."""
    print(json.dumps(figures, indent=2, default=float))
    if output:
        write_rows(output, figures_of(figures, "masks"), command_line())


if __name__ == "__main__":
    main()
