"""Write the offline workloads as files of requests, one workload a file, for any engine.

    python benchmarks/write_requests.py --model DIR --folder requests

DIR needs a config.json only. The files are what the first round of `benchmarks/serving.py` sends,
and `long_context`; `pagewire bench offline --requests FILE` and `peers/vllm/offline.py` run them.
"""

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

from serving import END_ID, FIRST_ID, WORKLOADS, requests, vocab_size

from pagewire.cli.bench_offline import Request

LONG_PROMPT, LONG_OUTPUT, LONG_SEED = 120_000, 256, 5


def long_context(ids: range) -> list[Request]:
    """One request of 120,000 tokens in and 256 out."""
    rng = random.Random(LONG_SEED)
    return [Request([rng.choice(ids) for _ in range(LONG_PROMPT)], LONG_OUTPUT)]


def workloads(vocabulary: int) -> dict[str, list[Request]]:
    """The requests of each workload, by its name."""
    ids = range(min(FIRST_ID, vocabulary // 2), min(END_ID, vocabulary))
    found = {name: requests(name, 0, ids) for name in WORKLOADS}
    return {**found, "long_context": long_context(ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--folder", type=Path, required=True, help="where the files go")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, batch in workloads(vocab_size(options.model)).items():
        path = options.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in batch))
        print(f"{path}: {len(batch)} requests")


if __name__ == "__main__":
    main()
