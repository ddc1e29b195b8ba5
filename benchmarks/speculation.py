"""The cost and gain of speculation: equal requests without and with drafts, alternating.

`chat` asks for stories, which repeat little. `quote` quotes a passage of the prompt, by a grammar.
The ratio is the time without drafts over the time with them, the median over the rounds. Ends with
status 1 if a token differs. With `--draft-model` the drafts are those of `--speculate draft`;
`benchmarks/replay/train_draft_model.py` trains a draft model.

    python benchmarks/speculation.py --output benchmarks/results/speculation-cpu.jsonl
"""

import argparse
import re
import statistics
import sys
import time
from pathlib import Path

from pagewire.bench.results import Figure, command_line, write_rows
from pagewire.llm import LLM, SamplingParams

PASSAGE = (
    "Tara is in the kitchen. Adam has a red kite. Hana likes plums. Peter went to the garden. "
    "Priya is a baker. Tom has seven apples. The garden is behind the old house. Nina sings well."
)
STORIES = ("Tell me a story.", "Who are you?", "Tell me about the moon.", "What do you like?")


def conversations(kind: str, clients: int) -> list[list[dict[str, str]]]:
    """One conversation for each client."""
    asked = STORIES if kind == "chat" else (f"Repeat after me: {PASSAGE}",)
    texts = [asked[number % len(asked)] for number in range(clients)]
    return [[{"role": "user", "content": text}] for text in texts]


def parameters(kind: str, clients: int, seed: int) -> list[SamplingParams]:
    """The parameters of each client."""
    if kind == "quote":
        form = {"regex": re.escape(PASSAGE)}
        return [SamplingParams(temperature=0, max_tokens=200, structured_outputs=form)] * clients
    return [
        SamplingParams(temperature=1, max_tokens=120, ignore_eos=True, seed=seed + number)
        for number in range(clients)
    ]


def run(llm: LLM, kind: str, clients: int, seed: int) -> tuple[list[list[int]], float]:
    """The tokens of each client, and the seconds until all have them."""
    begun = time.perf_counter()
    params = parameters(kind, clients, seed)
    outputs = llm.chat(conversations(kind, clients), params, progress=False)
    return [output.outputs[0].token_ids for output in outputs], time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 48])
    parser.add_argument("--draft-model")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = []
    name, drafts = "speculation", {"speculate": "suffix"}
    if options.draft_model:
        name, drafts = "draft-model", {"speculate": "draft", "draft_model": options.draft_model}
    with (
        LLM(options.model, num_slots=64, torch_threads=1) as plain,
        LLM(options.model, num_slots=64, torch_threads=1, **drafts) as speculating,
    ):
        for kind in ("chat", "quote"):
            for clients in options.clients:
                ratios = []
                for number in range(-1, options.rounds):  # the first one warms up
                    llms = (plain, speculating) if number % 2 else (speculating, plain)
                    results = {llm: run(llm, kind, clients, 1000 * number) for llm in llms}
                    tokens = [found[0] for found in results.values()]
                    if tokens[0] != tokens[1]:
                        sys.exit(f"{kind}, {clients} clients: the tokens differ")
                    if number >= 0:
                        ratios.append(results[plain][1] / results[speculating][1])
                ratio = statistics.median(ratios)
                print(f"{kind}, {clients} clients: {ratio:.2f}x ({min(ratios):.2f} to "
                      f"{max(ratios):.2f})", flush=True)  # fmt: skip
                figures.append(Figure(f"{name}/{kind}/{clients}/ratio", ratio, "ratio"))
    if options.output:
        write_rows(options.output, figures, command_line())


if __name__ == "__main__":
    main()
