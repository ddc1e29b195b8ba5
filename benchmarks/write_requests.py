"""Write the offline workloads as files of requests, one workload a file, for any engine.

    python benchmarks/write_requests.py --model DIR --folder requests [--only single mixed256]

DIR needs only a config.json. The files are the requests of the first round of
`benchmarks/serving.py`, and `long_context`, one request of 120,000 tokens in and 256 out.
`pagewire bench offline --requests FILE` and `peers/vllm/offline.py` run them.
"""

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

from serving import END_ID, FIRST_ID, WORKLOADS, requests, vocab_size

from pagewire.bench.offline import Request

LONG_CONTEXT = "long_context"
LONG_PROMPT, LONG_OUTPUT, LONG_SEED = 120_000, 256, 5
NAMES = (*WORKLOADS, LONG_CONTEXT)


def batch_of(name: str, vocabulary: int) -> list[Request]:
    """The requests of a workload."""
    ids = range(min(FIRST_ID, vocabulary // 2), min(END_ID, vocabulary))
    if name != LONG_CONTEXT:
        return requests(name, 0, ids)
    rng = random.Random(LONG_SEED)
    return [Request([rng.choice(ids) for _ in range(LONG_PROMPT)], LONG_OUTPUT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--folder", type=Path, required=True, help="where the files go")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        batch = batch_of(name, vocab_size(options.model))
        path = options.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in batch))
        print(f"{path}: {len(batch)} requests")


if __name__ == "__main__":
    main()
