"""Write the texts of `pagewire bench speculative`: prompts, and the answers of a good model.

    python benchmarks/replay/write_texts.py [--output FILE] [--each 8] [--kinds edit extract]

Everything is made here, under free licences. `edit` takes pairs of functions of Python's standard
library (PSF licence): the functions are swapped, one name in each is replaced, and one gets a new
line; the prediction is the original code. `extract` are records in sentences, which become JSON.
`quote` asks for two passages of docstrings of the standard library. `chat` is prose of our
decisions, which the prompt does not contain: the worst case, because nothing repeats.

`--each` sets the number of texts of a kind, if enough are available. The order is fixed, and the
same Python version writes the same file.
"""

import argparse
import ast
import importlib
import inspect
import io
import json
import random
import re
import textwrap
import tokenize
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
OUTPUT = HERE / "texts.jsonl"
PAGES = HERE.parents[1] / "docs" / "decisions"
EACH = 8  # texts of a kind
MODULES = (
    "textwrap", "shlex", "heapq", "bisect", "fractions", "difflib", "calendar", "statistics",
    "posixpath", "fnmatch", "string", "random", "cmd", "csv", "configparser", "mailbox", "gzip",
)  # fmt: skip
CODE = range(250, 900)  # characters of a function
NAMES = ("Amara", "Boris", "Chloe", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas")
CITIES = ("Lisbon", "Tromso", "Cusco", "Nagoya", "Galway", "Tunis", "Bergen", "Quito", "Izmir")
TRADES = ("carpenter", "botanist", "typesetter", "pilot", "potter", "surveyor", "brewer", "luthier")


def functions() -> Iterator[str]:
    """Functions and methods of some modules, without indentation, in a fixed order."""
    for name in MODULES:
        source = inspect.getsource(importlib.import_module(name))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                code = ast.get_source_segment(source, node, padded=True) or ""
                code = textwrap.dedent(code).strip()
                if len(code) in CODE and "\n\n" not in code:
                    yield code


def variable(code: str) -> str | None:
    """The most frequent local name or argument with four letters or more."""
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    local = {arg.arg for arg in function.args.args} | {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in sorted(local)}
    counts = {name: n for name, n in counts.items() if len(name) > 3 and n > 2 and name != "self"}
    return max(counts, key=lambda name: counts[name]) if counts else None


def renamed(code: str, old: str, new: str) -> str:
    """The code with another name for a variable; comments and strings stay."""
    lines = code.splitlines(keepends=True)
    tokens = [*tokenize.generate_tokens(io.StringIO(code).readline)]
    for token in reversed(tokens):
        if token.type == tokenize.NAME and token.string == old:
            (row, begin), (_, end) = token.start, token.end
            line = lines[row - 1]
            lines[row - 1] = line[:begin] + new + line[end:]
    return "".join(lines)


def edits(rng: random.Random) -> Iterator[dict[str, str]]:
    found = [(code, name) for code in functions() if (name := variable(code))]
    rng.shuffle(found)
    new_names = ("entry", "current", "amount", "source", "buffer", "offset")
    for first, second in zip(found[::2], found[1::2], strict=False):
        new = [rng.choice([n for n in new_names if n not in code]) for code, _ in (first, second)]
        after = [
            renamed(code, name, other)
            for (code, name), other in zip((first, second), new, strict=True)
        ]
        lines = after[0].splitlines()
        place = rng.randrange(len(lines) // 2, len(lines))
        old_line = lines[place]
        indent = old_line[: len(old_line) - len(old_line.lstrip())]
        lines[place] = f"{indent}# Checked above.\n{old_line}"
        before = f"{first[0]}\n\n\n{second[0]}\n"
        text = (
            f"Here are two functions:\n\n```python\n{before}```\n\nPut the second one first. In "
            f"the first one call `{first[1]}` `{new[0]}` instead, and write the comment 'Checked "
            f"above.' before the line `{old_line.strip()}`. In the second one call `{second[1]}` "
            f"`{new[1]}`. Answer with the code alone.\n\n```python\n"
        )
        answer = f"{after[1]}\n\n\n" + "\n".join(lines) + "\n```\n"
        yield {"kind": "edit", "prompt": text, "continuation": answer, "prediction": before}


def extractions(rng: random.Random) -> Iterator[dict[str, str]]:
    while True:
        people = [
            {
                "name": name,
                "age": rng.randrange(19, 80),
                "city": rng.choice(CITIES),
                "trade": rng.choice(TRADES),
                "phone": f"+{rng.randrange(30, 60)} {rng.randrange(10**8, 10**9)}",
            }
            for name in rng.sample(NAMES, 6)
        ]
        sentences = [
            f"{p['name']} lives in {p['city']} and is {p['age']} years old; the {p['trade']} can "
            f"be reached at {p['phone']}."
            for p in people
        ]
        rng.shuffle(sentences)
        text = (
            "Extract the people of this text as a JSON array of objects with the keys name, age, "
            "city, trade and phone:\n\n" + " ".join(sentences) + "\n\nJSON:\n"
        )
        order = sorted(people, key=lambda p: text.index(str(p["phone"])))
        yield {
            "kind": "extract",
            "prompt": text,
            "continuation": json.dumps(order, indent=2) + "\n",
        }


def quotes(rng: random.Random) -> Iterator[dict[str, str]]:
    passages = []
    for name in MODULES:
        module = importlib.import_module(name)
        for member in (module, *vars(module).values()):
            doc = inspect.getdoc(member) if inspect.isfunction(member) or member is module else None
            for part in (doc or "").split("\n\n"):
                prose = " ".join(part.split())
                if 200 < len(prose) < 600 and prose.count(">>>") == 0:
                    passages.append((name, prose))
    rng.shuffle(passages)
    for begin in range(0, len(passages) - 3, 4):
        group = passages[begin : begin + 4]
        wanted, also = rng.sample(range(4), 2)
        text = "\n\n".join(f"[{i + 1}] {prose}" for i, (_, prose) in enumerate(group))
        (one, first), (other, second) = group[wanted], group[also]
        question = (
            f"{text}\n\nQuote the passages [{wanted + 1}] and [{also + 1}] in full, and say from "
            "which modules they are.\n\nAnswer: "
        )
        answer = (
            f'Passage [{wanted + 1}] comes from {one}: "{first}" Of {other} on the other hand '
            f'is number [{also + 1}], which says: "{second}"\n'
        )
        yield {"kind": "quote", "prompt": question, "continuation": answer}


def chats(rng: random.Random) -> Iterator[dict[str, str]]:
    prose = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        title = text.splitlines()[0].lstrip("# ")
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("**", "").replace("`", "")
        parts = [" ".join(part.split()) for part in text.split("\n\n")]
        joined = " ".join(part for part in parts if part[:1].isalpha() and "|" not in part)
        if len(joined) > 900:  # else it is hardly prose
            prose.append((title, joined[:1400].rpartition(". ")[0] + "."))
    rng.shuffle(prose)
    for title, text in prose:
        yield {
            "kind": "chat",
            "prompt": f"Explain in your own words what was decided here: {title}.\n\nAnswer: ",
            "continuation": text,
        }


KINDS = {"edit": edits, "extract": extractions, "quote": quotes, "chat": chats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--each", type=int, default=EACH, help="texts of a kind, at most")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    output, lines = options.output, []
    for kind in options.kinds:
        made = islice(KINDS[kind](random.Random(27)), options.each)
        lines += [json.dumps(text, ensure_ascii=False) + "\n" for text in made]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
