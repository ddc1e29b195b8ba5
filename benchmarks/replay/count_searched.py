"""Tokens in each step on a GPU, by the number of searched tokens of recent outputs.

    python benchmarks/replay/count_searched.py [--texts FILE] [--kind extract] [--drafts 7]

The texts are answered one after the other under one salt, in steps with `--drafts` drafts, by the
kernel's reference in plain torch. The first four texts only become recent outputs. `--texts` is a
file of `write_texts.py`; more texts than its default give better figures.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from pagewire.models import resolve_model
from pagewire.packing import Int32Array
from pagewire.worker.ops.contract.drafts import COUNTS, TokenHistory
from pagewire.worker.ops.reference.drafts import end_drafted
from pagewire.worker.protocol.speculation.recent_outputs import MATCH, RecentOutputs

HERE = Path(__file__).parent
FIRST_COUNTED = 4


def history(prompt: Int32Array, length: int, recent: Int32Array, drafts: int) -> TokenHistory:
    """A sequence after its prompt; a first step draws the last prompt token."""
    rows = np.concatenate((recent, prompt[:-1], np.zeros(length + 1, np.int32)))
    one = torch.zeros(2, dtype=torch.int32)
    held = TokenHistory(
        rows=torch.from_numpy(np.stack((rows, rows))),
        positions=one + len(prompt) - 2,
        limits=one + len(rows),
        drafts=torch.zeros(2, drafts, dtype=torch.int32),
        num_drafts=one.clone(),
        drafters=one.clone(),
        predictions=torch.zeros(2, 4, dtype=torch.int32),
        num_recent=one + len(recent),
        first=len(recent),
    )
    take(held, prompt[-1:], drafts)
    return held


def take(held: TokenHistory, following: Int32Array, drafts: int) -> int:
    """Runs a step that draws the first of `following`; returns its number of tokens."""
    count = 1 + min(drafts, int(held.num_drafts[0]), len(following) - 1)
    places = torch.arange(count, dtype=torch.int32)
    drawn = torch.from_numpy(following[:count].copy())
    one = torch.zeros_like(places)
    results = end_drafted(
        drawn, torch.zeros(count, 1), one, places, held, torch.zeros_like(one[:2])
    )
    return int(results[COUNTS, 0])


def tokens_a_step(texts: list[tuple[Int32Array, Int32Array]], searched: int, drafts: int) -> float:
    recent, steps, tokens = RecentOutputs(), 0, 0
    for number, (prompt, output) in enumerate(texts):
        if number >= FIRST_COUNTED:
            before = recent.latest(searched) if searched else np.empty(0, np.int32)
            held, done = history(prompt, len(output), before, drafts), 0
            while done < len(output):
                done += take(held, output[done:], drafts)
                steps += 1
            tokens += len(output)
        recent.add(np.concatenate((prompt[-MATCH:], output)))
    return tokens / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, default=HERE / "texts.jsonl")
    parser.add_argument("--kind", default="extract")
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--searched", type=int, nargs="+", default=[0, 512, 1024, 2048, 4096])
    parser.add_argument("--tokenizer", type=Path, default=resolve_model("embedded"))
    options = parser.parse_args()
    encoder = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    lines = map(json.loads, options.texts.read_text().splitlines())
    texts = []
    for line in lines:
        if line["kind"] == options.kind:
            ids = [
                encoder.encode(line[name], add_special_tokens=False).ids
                for name in ("prompt", "continuation")
            ]
            texts.append((np.array(ids[0], np.int32), np.array(ids[1], np.int32)))
    for searched in options.searched:
        print(f"{searched:5d} {tokens_a_step(texts, searched, options.drafts):.2f}", flush=True)


if __name__ == "__main__":
    main()
