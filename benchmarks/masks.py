"""CPU time of the masks of a schema of ten fields, along random outputs.

`whole` is one matcher of all tokens, `worker` the matcher of a worker. Both must give equal masks.

    python benchmarks/masks.py --tokenizer DIR --vocabulary 151936
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.bench.schemas import LISTS
from pagewire.scheduler.structured.grammars import grammar_text
from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.v1 import inference_pb2 as pb
from pagewire.worker.protocol.constraints.grammars import Grammars, compile_grammar


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder")
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--outputs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="of each output")
    parser.add_argument("--output", type=Path, help="write the figures as rows")
    args = parser.parse_args()
    path = str(tokenizer_file(args.tokenizer))
    grammars = Grammars(LLTokenizer(path, n_vocab=args.vocabulary, eos_token=0))
    wanted = pb.StructuredOutput(json_schema=json.dumps(LISTS))
    grammar = grammar_text(wanted, grammars.tokenizer)
    whole = compile_grammar(grammars.tokenizer, grammar)
    draw, times = np.random.default_rng(0), defaultdict(list)
    expected, found = np.empty((2, grammars.words), np.int32)
    for number in range(args.outputs + 1):
        one, other = whole.deep_copy(), grammars.matcher(grammar)
        for step in range(args.tokens):
            # The order alternates, because the first one fills the cache for the second.
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
    print(json.dumps(figures, indent=2, default=float))
    if args.output:
        write_rows(args.output, figures_of(figures, "masks"), command_line())


if __name__ == "__main__":
    main()
