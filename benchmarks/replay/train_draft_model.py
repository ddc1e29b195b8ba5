"""Trains a draft model of the embedded model: its first layers, on texts of the same world.

python -m benchmarks.replay.train_draft_model --layers 1 --seconds 300 --out /tmp/draft-model
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tools.embedded_model.corpus import documents
from tools.embedded_model.tokenizer import render
from transformers import AutoModelForCausalLM

from pagewire.models import resolve_model

LENGTH = 128  # tokens of a row
ROWS = 16  # of a batch
RATE = 1e-3
SEED = 7  # differs from the seed of the embedded model's texts


def rows_of(tokenizer: Tokenizer, count: int) -> torch.Tensor:
    """`[rows, LENGTH]` token ids of `count` documents, one after the other."""
    tokens: list[int] = []
    for document in documents(SEED, 0, count):
        tokens += tokenizer.encode(render(document), add_special_tokens=False).ids
    ids = np.array(tokens[: len(tokens) // LENGTH * LENGTH], np.int64)
    return torch.from_numpy(ids.reshape(-1, LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="of training")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    source = resolve_model("embedded")
    rows = rows_of(Tokenizer.from_file(str(source / "tokenizer.json")), options.documents)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.model.layers = model.model.layers[: options.layers]
    model.config.num_hidden_layers = options.layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    begun, step = time.monotonic(), 0
    while (passed := (time.monotonic() - begun) / options.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20) * (1 - 0.95 * passed)
        batch = rows[torch.randint(len(rows), (ROWS,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}, {passed:.0%} of the time, loss {loss.item():.3f}", flush=True)
        step += 1
    model.save_pretrained(options.out)
    print(f"{options.layers} layers, {step} steps of {ROWS * LENGTH} tokens: {options.out}")


if __name__ == "__main__":
    main()
