"""Measures the exported model in transformers, like any Hugging Face folder.

    python -m tools.embedded_model.evaluate shared/pagewire/embedded/model

prints held-out perplexity, the share of small sums it gets right, and answers to probe questions.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tools.embedded_model.arithmetic import VERBS, digits, result, spell
from tools.embedded_model.packing import Rows, pack
from tools.embedded_model.words import capital
from transformers import AutoModelForCausalLM, AutoTokenizer

# The conversations whose answers are printed, in the order of their user turns.
PROBES: tuple[tuple[str, ...], ...] = (
    ("Hello!", "How are you?", "I'm fine, thanks."),
    ("What is your name?", "My name is Tom.", "What is my name?"),
    ("Who are you?",),
    ("what can you do",),
    ("What is seven plus five?", "And twelve minus four?", "whats 2+2"),
    ("6 * 7", "56 / 8", "17+25", "100 - 58", "12345 * 678"),
    ("Tom has three apples. He eats one. How many apples does he have?",),
    ("Anna has nine pears. She gives four to Ben. How many pears does Anna have left?",),
    ("Count from three to nine.", "Count down from ten.", "count to 5"),
    ("What colour is the sky?", "What do blue and yellow make?", "what color is a banana"),
    ("What is the opposite of hot?", "And of big?", "opposite of happy"),
    ("What sound does a cow make?", "How many legs does a spider have?", "Can a penguin fly?"),
    ("What day comes after Monday?", "Which month is before May?"),
    ("I have a red ball and a blue kite. What colour is my kite?", "And my ball?"),
    ("My dog is called Biscuit.", "What is two plus two?", "What is my dog's name?"),
    ("My name is Zorblin.", "I live in Lisbon.", "Where do I live?", "Who am I?"),
    ("Tom is in the garden. Mia has a red hat. Where is Tom?", "What does Mia have?"),
    ("What is the capital of France?", "Who is the president of Brazil?"),
    ("Tell me a story about a fox.", "What was the fox's name?", "Thank you!"),
    ("Tell me a story about a girl called Mia.", "Where did Mia live?"),
    ("tell me a story about a robot and a cat",),
    ("Tell me a story about a storm.",),
    ("I am sad.", "Yes, please."),
    ("Repeat after me: green apples are tasty", "Say: 你好 🙂"),
    ("Name three fruits.", "Spell cat.", "Which is bigger, an ant or a horse?"),
    ("Explain quantum physics to me.", "Write a Python program."),
    ("Tell me a joke.", "Good night!"),
    ("What is Pagewire?", "bye"),
    ("Which is bigger, seven or nine?", "What comes after nineteen?", "Is 8 even or odd?"),
    ("How many days are in a week?", "Why is the sky blue?"),
)
STARTS = ("Once upon a time", "Once upon a time, there was a little girl", "The opposite of")


@dataclass(frozen=True, slots=True)
class Report:
    """The measured quality of a model folder."""

    parameters: int
    perplexity: float
    heldout_tokens: int
    sums_right: int
    sums_asked: int
    chats: tuple[tuple[tuple[str, str], ...], ...]
    texts: tuple[tuple[str, str], ...]


class Speaker:
    """A model folder that answers greedily."""

    def __init__(self, folder: Path, device: str) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.model.to(device).eval()
        if device == "cpu":
            self.model.float()  # few CPUs are fast in bfloat16
        self.device = device

    def answers(self, chats: list[list[dict[str, str]]], limit: int = 320) -> list[str]:
        """The next assistant turn of each chat."""
        prompts = [
            self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
            for c in chats
        ]
        return self.continuations(prompts, limit)

    def continuations(self, prompts: list[str], limit: int = 320) -> list[str]:
        """The model's output after each prompt until it stops."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=limit,
                do_sample=False,
            )
        written = out[:, batch["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(written, skip_special_tokens=True))


def perplexity(model: Any, rows: Rows, device: str) -> tuple[float, int]:
    """The perplexity of the learned tokens of the rows, and their number."""
    total, count = 0.0, 0
    for i in range(0, len(rows.ids), 4):
        ids = torch.from_numpy(rows.ids[i : i + 4].astype(np.int64)).to(device)
        mask = torch.from_numpy(rows.learned[i : i + 4, 1:]).to(device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            losses = F.cross_entropy(logits[mask].float(), ids[:, 1:][mask], reduction="sum")
        total += float(losses)
        count += int(mask.sum())
    return math.exp(total / count), count


def small_sums() -> list[tuple[str, str]]:
    """Every sum and difference of 0 to 20 and product of 0 to 12, in digits and in words."""
    asked = []
    for op, top in (("+", 20), ("-", 20), ("*", 12)):
        for a in range(top + 1):
            for b in range(top + 1):
                value, verb = result(op, a, b), VERBS[op]
                asked.append((f"What is {a} {op} {b}?", f"{a} {verb} {b} is {digits(value)}."))
                words = f"{spell(a)} {verb} {spell(b)}"
                asked.append((f"What is {words}?", f"{capital(words)} is {spell(value)}."))
    return asked


def sums_right(speaker: Speaker, batch: int) -> tuple[int, int]:
    """The number of right answers to the small sums, and the number of sums."""
    asked = small_sums()
    right = 0
    for i in range(0, len(asked), batch):
        part = asked[i : i + batch]
        chats = [[{"role": "user", "content": question}] for question, _ in part]
        told = speaker.answers(chats, limit=32)
        right += sum(t == answer for t, (_, answer) in zip(told, part, strict=True))
    return right, len(asked)


def probe(speaker: Speaker) -> tuple[tuple[tuple[str, str], ...], ...]:
    """The probe conversations with the model's answers; all next turns run as one batch."""
    histories: list[list[dict[str, str]]] = [[] for _ in PROBES]
    for turn in range(max(map(len, PROBES))):
        live = [i for i, users in enumerate(PROBES) if turn < len(users)]
        for i in live:
            histories[i].append({"role": "user", "content": PROBES[i][turn]})
        for i, text in zip(live, speaker.answers([histories[i] for i in live]), strict=True):
            histories[i].append({"role": "assistant", "content": text})
    return tuple(
        tuple((h[j]["content"], h[j + 1]["content"]) for j in range(0, len(h), 2))
        for h in histories
    )


def evaluate(folder: Path, heldout: Rows, device: str) -> Report:
    """Load a model folder and measure it."""
    speaker = Speaker(folder, device)
    value, tokens = perplexity(speaker.model, heldout, device)
    right, asked = sums_right(speaker, batch=512 if device == "cuda" else 64)
    return Report(
        parameters=sum(p.numel() for p in speaker.model.parameters()),
        perplexity=value,
        heldout_tokens=tokens,
        sums_right=right,
        sums_asked=asked,
        chats=probe(speaker),
        texts=tuple(zip(STARTS, speaker.continuations(list(STARTS)), strict=True)),
    )


def show(report: Report) -> str:
    """The report as text."""
    lines = [
        f"parameters {report.parameters}, held-out perplexity {report.perplexity:.4f} on "
        f"{report.heldout_tokens} tokens, sums {report.sums_right}/{report.sums_asked}",
    ]
    for chat in report.chats:
        lines.append("")
        for user, answer in chat:
            lines += [f"> {user}", f"  {answer}"]
    for start, text in report.texts:
        lines += ["", f"[{start}]{text}"]
    return "\n".join(lines)


def main() -> None:
    """Measure a folder and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--heldout-seed", type=int, default=2)
    parser.add_argument("--heldout", type=int, default=500, help="documents, also ones trained on")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    heldout = pack(tokenizer, args.heldout_seed, args.heldout, 1024)
    print(show(evaluate(args.model, heldout, device)))


if __name__ == "__main__":
    main()
