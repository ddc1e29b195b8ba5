"""Make the embedded chat model: corpus, tokenizer, training, export, measurement, model card.

    python -m tools.embedded_model.train --out shared/pagewire/embedded/model

runs on one GPU in some minutes, or on a CPU with a small --steps. The corpus depends only
on the seed; --seconds bounds the time of training by fitting the number of steps to the machine.
"""

import argparse
import datetime
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tools.embedded_model.card import Making, card
from tools.embedded_model.corpus import documents
from tools.embedded_model.decoder import Decoder, Shape
from tools.embedded_model.evaluate import evaluate, show
from tools.embedded_model.packing import Rows, pack
from tools.embedded_model.tokenizer import (
    END_OF_TEXT_ID,
    PAD_ID,
    TURN_END_ID,
    save_tokenizer,
    train_tokenizer,
)
from torch import Tensor

TIMED_FROM, TIMED_TO = 30, 80  # the steps whose duration fits --steps to --seconds


@dataclass(frozen=True, slots=True)
class Recipe:
    """The numbers of one training run."""

    steps: int
    seconds: float
    rows: int
    rate: float
    warmup: int = 200
    decay: float = 0.1
    clip: float = 1.0
    final: float = 0.01  # of the peak rate


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a hundredth of the peak."""
    warmup = min(recipe.warmup, max(1, steps // 10))
    if step < warmup:
        return recipe.rate * (step + 1) / warmup
    part = min(1.0, (step - warmup) / max(1, steps - warmup))
    return recipe.rate * (recipe.final + (1 - recipe.final) * 0.5 * (1 + math.cos(math.pi * part)))


def train(model: Decoder, data: Rows, recipe: Recipe, device: str) -> tuple[int, float]:
    """Train the model in place; return the steps made and the seconds they took."""
    ids = torch.from_numpy(data.ids).to(device)  # [rows, length]
    learned = torch.from_numpy(data.learned).to(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.rate,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    loss_of = torch.compile(model.loss) if device == "cuda" else model.loss
    draw = torch.Generator().manual_seed(0)
    order = torch.empty(0, dtype=torch.int64)
    steps, start, step, ema = recipe.steps, time.monotonic(), 0, torch.zeros((), device=device)
    timed = start
    while step < steps:
        if len(order) < recipe.rows:
            order = torch.randperm(len(ids), generator=draw)
            if len(order) < recipe.rows:
                order = order.repeat(recipe.rows // len(order) + 1)
        picked, order = order[: recipe.rows].to(device), order[recipe.rows :]
        batch = ids[picked].long()
        targets = batch.masked_fill(~learned[picked], -100)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, steps)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: Tensor = loss_of(batch, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema = loss.detach() if step == 0 else ema.lerp(loss.detach(), 0.02)
        step += 1
        if step == TIMED_FROM:
            timed = _now(device)
        if step == TIMED_TO and recipe.seconds:
            each = (_now(device) - timed) / (TIMED_TO - TIMED_FROM)
            left = recipe.seconds - (_now(device) - start)
            steps = min(steps, step + int(left / each))
            print(f"{each * 1000:.1f} ms a step, {steps} steps", flush=True)
        if step % 250 == 0 or step in (1, 10, steps):
            print(
                f"step {step}/{steps} loss {float(ema):.4f} "
                f"rate {learning_rate(recipe, step, steps):.5f} {time.monotonic() - start:.0f} s",
                flush=True,
            )
    return step, _now(device) - start


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def export(model: Decoder, shape: Shape, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors in bfloat16."""
    weights = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    stops = [TURN_END_ID, END_OF_TEXT_ID]
    tokens = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": stops, "pad_token_id": PAD_ID}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.positions,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.epsilon,
        "rope_scaling": None,
        "rope_theta": shape.theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
        **tokens,
    }
    generation = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, **tokens}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run all stages and leave a complete model folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=1_600_000)
    parser.add_argument("--heldout", type=int, default=2000, help="documents of seed + 1")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16_000, help="at most")
    parser.add_argument("--seconds", type=float, default=0, help="of training at most; 0: no limit")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(vocab=args.vocab)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    clock = time.monotonic()
    sample = documents(args.seed, 0, min(args.documents, 60_000))
    tokenizer = train_tokenizer(sample, args.vocab)
    save_tokenizer(tokenizer, args.out, shape.positions)
    print(
        f"tokenizer of {tokenizer.get_vocab_size()}: {time.monotonic() - clock:.0f} s", flush=True
    )
    data = pack(tokenizer, args.seed, args.documents, args.length)
    heldout = pack(tokenizer, args.seed + 1, args.heldout, args.length, skip=data.digests)
    filled = int(np.count_nonzero(data.ids != PAD_ID))
    print(
        f"{args.documents} documents ({len(data.digests)} distinct), {filled / 1e6:.1f} M tokens, "
        f"{data.learned.mean():.2f} learned, {filled / data.ids.size:.3f} filled: "
        f"{time.monotonic() - clock:.0f} s",
        flush=True,
    )

    model = Decoder(shape).to(device)
    recipe = Recipe(steps=args.steps, seconds=args.seconds, rows=args.rows, rate=args.rate)
    steps, seconds = train(model, data, recipe, device)
    export(model, shape, args.out)

    report = evaluate(args.out, heldout, device)
    machine = (
        f"one {torch.cuda.get_device_name()}" if device == "cuda" else f"{os.cpu_count()} CPUs"
    )
    options = [a for a in sys.argv[1:] if a not in ("--out", str(args.out))]
    making = Making(
        command=" ".join(["python -m tools.embedded_model.train --out MODEL_FOLDER", *options]),
        date=datetime.date.today().isoformat(),
        machine=machine,
        documents=args.documents,
        tokens=int(steps * args.rows * args.length * filled / data.ids.size),
        steps=steps,
        seconds=round(seconds),
    )
    (args.out / "README.md").write_text(card(shape, making, report), encoding="utf-8")
    print(show(report))


if __name__ == "__main__":
    main()
