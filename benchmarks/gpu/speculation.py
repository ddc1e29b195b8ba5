"""The gain of drafts on a GPU: decode steps with and without drafts, with forced outputs.

    python benchmarks/gpu/speculation.py --model DIR [--clients 1 8 64] [--kinds chat] [--output F]
    python benchmarks/gpu/speculation.py --model DIR --recent 0 4 [--quantization fp8]
    python benchmarks/gpu/speculation.py --model DIR --draft-model DIR [--depths 0 1 3 5]
    python benchmarks/gpu/speculation.py --model DIR --eagle DIR [--depths 0 1 3 5]

DIR needs only a config.json: the weights are random. Each token is drawn as usual, then replaced by
the next token of a text (`--forced-texts`). So all work is done, and drafts are right as often as
in that text. Tokens are pieces of text: parts of names, numbers, signs. The texts are

- `code`: a function of Python's library with a name changed and lines commented, asked to be edited
- `json`: persons in a text, as a list of objects
- `chat`: prose of this repository's documentation, continued
- `new`: random tokens, which no drafter gets right

One process plans, submits and reads steps two ahead, without scheduler and HTTP. It has a backend
with drafts and one without, which share weights and KV pool. Outputs are cut into parts, and the
two backends alternate part by part, so both have the same clock and temperature. A ratio is the
median over all parts. The KV of prompts is zeros, because no token depends on it.

With `--recent N` each client has N earlier outputs of the same kind, under its own salt.

With a draft model or an EAGLE head no text is forced, because random weights draft nothing right.
The figure is the time of steps with `depth` drafts of each sequence over the time of steps without
drafter. This is the number of tokens that a sequence needs in a step, drafts included, to gain. If
each draft is right with probability p, `depth` drafts yield 1 + p + ... + p^depth tokens.
"""

import argparse
import ast
import json
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.config import WorkerConfig
from pagewire.packing import Int32Array
from pagewire.worker.protocol.speculation.slot_outputs import SlotOutputs
from pagewire.worker.protocol.steps import device_drafts
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.slots import Slots
from pagewire.worker.protocol.steps.step import Start, Step, StepSampling
from pagewire.worker.runtime import eager
from pagewire.worker.runtime.graphs.backend import GraphBackend
from pagewire.worker.startup.loading import load_worker

PIECES = re.compile(r" ?[A-Z]?[a-z]+| ?[A-Z]+(?![a-z])| ?\d{1,3}|\n[ \t]*| ?[^\sA-Za-z\d]{1,3}|\s")
TEXTS, PROMPT, OUTPUT = 64, 430, 460
NONE = np.empty(0, np.int32)
BLOCK = 16
MEASURED = 0.9  # of an output, so that all sequences still decode
PARTS = 8  # of an output
STARTED = 8  # sequences that start in one step
NAMES = [
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Elena",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Karin",
    "Liam",
    "Maria",
    "Nils",
    "Olga",
]
CITIES = [
    "Berlin",
    "Lisbon",
    "Oslo",
    "Madrid",
    "Vienna",
    "Prague",
    "Dublin",
    "Athens",
    "Warsaw",
    "Helsinki",
]


@dataclass
class Text:
    """A prompt and its output, as token ids."""

    prompt: list[int]
    output: list[int]


@dataclass
class Vocabulary:
    """Ids of pieces, in the order of their first occurrence."""

    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, 100 + len(self.ids)) for piece in PIECES.findall(text)]


def code_edits(vocabulary: Vocabulary, chance: random.Random) -> list[Text]:
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.end_lineno is None:
                continue
            if not 50 <= node.end_lineno - node.lineno <= 110:
                continue
            body = lines[node.lineno - 1 : node.end_lineno]
            names = re.findall(r"\b(?!self|def|return|for|not|and)[a-z_]{3,}\b", "\n".join(body))
            name = max(sorted(set(names)), key=names.count)
            edited = [re.sub(rf"\b{name}\b", f"{name}_value", line) for line in body]
            for number in range(9, len(edited), 14):
                edited[number] += chance.choice(["  # checked", "  # as the caller expects"])
            prompt = vocabulary.encode("\n".join(["Rename it, and comment:", *body, "Changed:\n"]))
            output = vocabulary.encode("\n".join(edited))
            if len(prompt) < 1000 and len(output) >= OUTPUT:
                texts.append(Text(prompt, output[:OUTPUT]))
    chance.shuffle(texts)
    return texts[:TEXTS]


def extractions(vocabulary: Vocabulary, chance: random.Random) -> list[Text]:
    texts = []
    for _ in range(TEXTS):
        people = [
            {
                "name": f"{chance.choice(NAMES)} {chance.choice(NAMES)}sen",
                "age": chance.randrange(18, 80),
                "city": chance.choice(CITIES),
                "email": f"{chance.choice(NAMES).lower()}{chance.randrange(100)}@example.org",
                "order": chance.randrange(1000, 99999),
            }
            for _ in range(16)
        ]
        said = " ".join(
            f"{one['name']}, who is {one['age']}, lives in {one['city']}; the address for mail is "
            f"{one['email']} and the order has number {one['order']}."
            for one in people
        )
        prompt = vocabulary.encode(f"Extract all persons as JSON.\n{said}\n")
        texts.append(Text(prompt, vocabulary.encode(json.dumps(people, indent=2))[:OUTPUT]))
    return texts


def prose(vocabulary: Vocabulary, chance: random.Random) -> list[Text]:
    texts = []
    for path in sorted((Path(__file__).parents[2] / "docs").rglob("*.md")):
        lines = [line for line in path.read_text().splitlines() if "|" not in line]
        ids = vocabulary.encode("\n".join(lines))
        for at in range(0, len(ids) - PROMPT - OUTPUT, PROMPT + OUTPUT):
            end = at + PROMPT
            texts.append(Text(ids[at:end], ids[end : end + OUTPUT]))
    chance.shuffle(texts)
    return texts[:TEXTS]


def new_tokens(chance: random.Random) -> list[Text]:
    def drawn(length: int) -> list[int]:
        return [chance.randrange(100, 30_000) for _ in range(length)]

    return [Text(drawn(PROMPT), drawn(OUTPUT)) for _ in range(TEXTS)]


def all_texts() -> dict[str, list[Text]]:
    vocabulary, chance = Vocabulary(), random.Random(7)
    return {
        "code": code_edits(vocabulary, chance),
        "json": extractions(vocabulary, chance),
        "chat": prose(vocabulary, chance),
        "new": new_tokens(chance),
    }


def write_texts(path: Path, texts: list[Text]) -> None:
    """Writes the file of `--forced-texts`, which makes a worker return these outputs."""
    lines = [{"prompt_token_ids": text.prompt, "token_ids": text.output} for text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@dataclass
class Part:
    """Steps of one backend over a part of the outputs."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.tokens + other.tokens, self.steps + other.steps, self.seconds + other.seconds
        )


class Run:
    """Sequences on one backend, from their prompts on."""

    def __init__(
        self,
        backend: GraphBackend,
        texts: list[Text],
        forced: bool = True,
        before: list[list[Text]] | None = None,
    ) -> None:
        """`forced`: outputs are those of `texts`; `before`: earlier outputs of each slot."""
        self._backend, self._texts, self._forced = backend, texts, forced
        self._slots = Slots(backend.limits, None, backend.row_costs)
        self._number = 0
        self._outputs: list[list[int]] = [[] for _ in texts]
        self._decodes: Int32Array | None = np.arange(len(texts), dtype=np.int32)
        drafts = self._slots._drafts
        if before is not None and isinstance(drafts, device_drafts.DeviceDrafts):
            remember(drafts._outputs, before)
        starts = self._starts()
        for at in range(0, len(starts), STARTED):
            some = starts[at : at + STARTED]
            slots = np.array([start.slot for start in some], np.int32)
            fields = {"prefill_slots": slots, "prefill_counts": np.ones_like(slots)}
            self._take(*self._step(decode_slots=NONE, starts=some, **fields))

    def advance(self, length: int) -> Part:
        """Decodes until the longest output has `length` tokens or more."""
        part = Part()
        pending = [self._step(decode_slots=self._decodes)]
        self._decodes = None  # as in the step before
        begin = time.perf_counter()
        while max(map(len, self._outputs)) < length:
            pending.append(self._step())
            part.tokens += self._take(*pending.pop(0))
            part.steps += 1
        part.seconds = time.perf_counter() - begin
        self._take(*pending.pop(0))
        for output, text in zip(self._outputs, self._texts, strict=True):
            if self._forced and output != text.output[: len(output)]:
                sys.exit("an output is not its text")
        return part

    def _starts(self) -> tuple[Start, ...]:
        limits = self._backend.limits
        blocks = iter((1 + np.random.default_rng(0).permutation(limits.num_blocks - 1)).tolist())
        return tuple(
            Start(
                slot=slot,
                token_ids=np.array(text.prompt, np.int32),
                num_generated=0,
                num_computed=len(text.prompt) - 1,
                blocks=np.array([next(blocks) for _ in range(blocks_of(text))], np.int32),
                sampling=StepSampling(),
                max_new_tokens=OUTPUT,
                cache_salt=str(slot),
            )
            for slot, text in enumerate(self._texts)
        )

    def _step(self, decode_slots: Int32Array | None = None, **fields: Any) -> tuple:
        self._number += 1
        empty = dict.fromkeys(
            ("append_slots", "append_blocks", "prefill_slots", "prefill_counts"), NONE
        )
        defaults = {"number": self._number, "starts": (), **empty, "decode_slots": decode_slots}
        planned = self._slots.plan(Step(**(defaults | fields)))
        assert not planned.failures
        return planned.plan, self._backend.submit(planned.plan)

    def _take(self, plan: DevicePlan, handle: Any) -> int:
        """Reads a step; returns its number of tokens."""
        outcome = self._backend.wait(handle)
        assert not outcome.failures
        self._slots.take(plan, outcome.tokens, outcome.taken, outcome.right)
        kept = outcome.tokens >= 0
        if outcome.taken is not None:
            kept &= outcome.taken
        tokens = outcome.tokens[kept].tolist()
        for slot, token in zip(plan.sample_slots[kept].tolist(), tokens, strict=True):
            self._outputs[slot].append(token)
        return len(tokens)


def remember(outputs: SlotOutputs, before: list[list[Text]]) -> None:
    """Records the ended outputs `before [slots]`, each under the salt of its slot."""
    for slot, texts in enumerate(before):
        for text in texts:
            outputs.start(slot, str(slot), np.array(text.prompt, np.int32))
            outputs.add(np.full(OUTPUT, slot, np.int32), np.array(text.output, np.int32))
            outputs.publish(NONE)


def blocks_of(text: Text) -> int:
    """Blocks of a whole sequence."""
    return -(-(len(text.prompt) + OUTPUT) // BLOCK)


def load(
    model: str,
    texts: list[Text],
    clients: int,
    drafter: dict[str, str] | None = None,
    quantization: str | None = None,
) -> tuple[GraphBackend, GraphBackend]:
    """A backend without drafts and one with them, of the same weights and KV pool.

    `drafter` are the settings of a draft model or a head.
    """
    weights: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
    with tempfile.TemporaryDirectory() as folder:
        forced = Path(folder, "texts.jsonl")
        write_texts(forced, texts)
        suffixes: dict[str, Any] = {"speculate": "suffix", "forced_texts": str(forced)}
        config = WorkerConfig(
            model=model,
            load_format="dummy",
            num_slots=clients,
            block_size=BLOCK,
            num_blocks=1 + clients * max(map(blocks_of, texts)),
            max_model_len=2048,
            **weights,
            **(drafter or suffixes),
        )
        drafting = load_worker(config).backend
    assert isinstance(drafting, GraphBackend)
    drafting.warm_up()
    limits = replace(drafting.limits, max_drafts=0, drafts_on_device=False)
    with patch.object(eager, "empty_cache", lambda *_: drafting._cache):
        plain = GraphBackend(drafting._decoder, limits, drafting._decoder.weights.embedding.dtype)
    plain.dummy_run()
    plain.warm_up()
    return plain, drafting


def compare(
    plain: GraphBackend,
    drafting: GraphBackend,
    texts: list[Text],
    parts: int,
    before: list[list[Text]] | None = None,
) -> tuple[list[float], Part, Part]:
    """The ratio of each of the first parts of the outputs, and the sums of both backends."""
    ratios, sums = [], (Part(), Part())
    runs = Run(plain, texts), Run(drafting, texts, before=before)
    for number in range(parts):
        length = round(MEASURED * OUTPUT * (number + 1) / PARTS)
        order = (0, 1) if number % 2 else (1, 0)
        done = {which: runs[which].advance(length) for which in order}
        ratios.append(done[1].rate / done[0].rate)
        sums = sums[0] + done[0], sums[1] + done[1]
    return ratios, *sums


def measure(
    name: str,
    plain: GraphBackend,
    drafting: GraphBackend,
    texts: dict[str, list[Text]],
    clients: int,
    rounds: int,
    recent: int,
) -> list[Figure]:
    """Prints and returns the figures of all kinds of texts with `clients` clients.

    Each client has `recent` earlier outputs.
    """
    figures = []
    for kind, some in texts.items():
        ratios: list[float] = []
        without, drafted = Part(), Part()
        compare(plain, drafting, some[:1] * clients, 1)  # to warm up
        for number in range(rounds):
            chosen = [some[(number + i) % len(some)] for i in range(clients)]
            others = [
                [some[(number + i + clients + j) % len(some)] for j in range(recent)]
                for i in range(clients)
            ]
            found = compare(plain, drafting, chosen, PARTS, others)
            ratios += found[0]
            without, drafted = without + found[1], drafted + found[2]
        ratio = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name} {clients:3d} {kind:5s} {recent} recent {ratio:.3f}x "
            f"(quartiles {low:.3f}, {high:.3f}, {len(ratios)} parts; "
            f"sums {drafted.rate / without.rate:.3f}x): "
            f"{without.rate:.0f} and {drafted.rate:.0f} tok/s, "
            f"{drafted.tokens / drafted.steps / clients:.2f} tokens a row, steps of "
            f"{without.seconds / without.steps * 1e3:.2f} and "
            f"{drafted.seconds / drafted.steps * 1e3:.2f} ms",
            flush=True,
        )
        case = f"{name}/{kind}/{clients}" + (f"/{recent} recent" if recent else "")
        figures.append(Figure(f"{case}/ratio", ratio, "ratio"))
        figures.append(Figure(f"{case}/rate", drafted.rate, "tok/s"))
    return figures


def measure_depths(
    name: str,
    plain: GraphBackend,
    drafting: GraphBackend,
    texts: list[Text],
    clients: int,
    depths: list[int],
) -> list[Figure]:
    """Prints and returns the times of steps by number of drafts of each sequence."""
    figures = []
    for depth in depths:
        with ExitStack() as stack:
            stack.enter_context(patch.object(device_drafts, "UNTRIED_STEPS", 1 << 30))
            stack.enter_context(
                patch.object(
                    device_drafts.DeviceDrafts,
                    "_lengths",
                    lambda _, slots, *__, depth=depth: np.full(len(slots), depth, np.int32),
                )
            )
            runs = [Run(each, texts[:clients], forced=False) for each in (plain, drafting)]
            times: tuple[list[float], list[float]] = ([], [])
            drafted = Part()
            for number in range(PARTS + 1):
                length = round(MEASURED * OUTPUT * (number + 1) / (PARTS + 1))
                for which in (0, 1) if number % 2 else (1, 0):
                    part = runs[which].advance(length)
                    if number and part.steps:  # the first part warms up
                        times[which].append(part.seconds / part.steps * 1e3)
                        drafted += part if which else Part()
        without, found = map(statistics.median, times)
        ratios = [b / a for a, b in zip(*times, strict=False)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name} {clients:3d} clients, {depth} drafts: {found:.2f} ms, without {without:.2f} "
            f"ms, ratio {ratio:.3f} (quartiles {low:.3f}, {high:.3f}); "
            f"{drafted.tokens / max(1, drafted.steps) / clients:.2f} tokens a row",
            flush=True,
        )
        figures.append(Figure(f"{name}/depth {depth}/{clients}/step", found, "ms"))
        figures.append(Figure(f"{name}/depth {depth}/{clients}/ratio", ratio, "ratio"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--kinds", nargs="+", default=["code", "json", "chat", "new"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--recent", type=int, nargs="+", default=[0], help="outputs before")
    parser.add_argument("--quantization", help="of the weights, such as fp8")
    parser.add_argument("--draft-model", help="folder of a draft model")
    parser.add_argument("--eagle", help="folder of an EAGLE head")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    texts = {kind: some for kind, some in all_texts().items() if kind in options.kinds}
    every = [text for some in texts.values() for text in some]
    drafter = None
    if (folder := options.eagle or options.draft_model) is not None:
        drafter = {"speculate": "eagle" if options.eagle else "draft", "draft_model": folder}
    weights = options.quantization
    plain, drafting = load(options.model, every, max(options.clients), drafter, weights)
    figures, name = [], Path(options.model).name + (f" {weights}" if weights else "")
    for clients in options.clients:
        if drafter is None:
            for recent in options.recent:
                figures += measure(name, plain, drafting, texts, clients, options.rounds, recent)
            continue
        beside = f"{name} beside {Path(drafter['draft_model']).name}"
        figures += measure_depths(beside, plain, drafting, every, clients, options.depths)
    if options.output:
        write_rows(options.output, figures, command_line())


if __name__ == "__main__":
    main()
