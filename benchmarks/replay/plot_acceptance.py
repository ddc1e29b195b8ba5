"""Draw the share of right drafts on recorded texts, by kind of text and drafter.

    python benchmarks/replay/plot_acceptance.py [--rows FILE] [--output FILE.svg]

The rows are those of `pagewire bench speculative --output`, with one client. A bar is all drafts of
a kind of text; its dark parts are the accepted drafts, by drafter.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from pagewire.bench.results import read_rows, write_file

RESULTS = Path(__file__).parents[1] / "results"
ROWS = RESULTS / "speculation-acceptance-cpu.jsonl"
PLOT = RESULTS / "plots" / "speculation-acceptance.svg"

COLOURS = {"suffix": "#3465a4", "prediction": "#e08a1e", "recent": "#2a9d4a", "grammar": "#8a4fb0"}
WIDTH, ROW, LEFT, RIGHT, TOP = 720, 34, 170, 640, 52


def counts(path: Path) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Drafts and accepted drafts by drafter, for each kind of text and mode."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in read_rows(path):
        _, kind, clients, mode, *rest = row.name.split("/")
        if clients == "1" and rest[0] in ("drafts", "accepted"):
            found[kind, mode][rest[1]][rest[0]] = row.value
    return {
        case: {name: (each["drafts"], each["accepted"]) for name, each in by.items()}
        for case, by in found.items()
    }


def svg(cases: dict[tuple[str, str], dict[str, tuple[float, float]]]) -> str:
    """The plot as an SVG document: a bar of 100 % of the drafts of each case."""
    height = TOP + ROW * len(cases) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="12" y="20" font-size="14">Drafts that were right, by their drafter</text>',
    ]
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 110
        parts.append(f'<rect x="{x}" y="30" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="39">{name}</text>')
    for row, ((kind, mode), drafters) in enumerate(cases.items()):
        y, begin = TOP + row * ROW, float(LEFT)
        drafts = sum(drafted for drafted, _ in drafters.values())
        right = sum(accepted for _, accepted in drafters.values())
        label = kind if mode != "prediction" else f"{kind}, with prediction"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 20}" text-anchor="end">{label}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y + 6}" width="{RIGHT - LEFT}" height="20" fill="#e6e6e6"/>'
        )
        for name, (_, accepted) in sorted(drafters.items()):
            width = (RIGHT - LEFT) * accepted / drafts
            parts.append(
                f'<rect x="{begin:.1f}" y="{y + 6}" width="{width:.1f}" height="20" '
                f'fill="{COLOURS[name]}"/>'
            )
            begin += width
        percent = f"{right / drafts:.0%} of {drafts:,.0f}"
        parts.append(f'<text x="{RIGHT + 6}" y="{y + 20}">{percent}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--output", type=Path, default=PLOT)
    options = parser.parse_args()
    write_file(options.output, svg(counts(options.rows)))


if __name__ == "__main__":
    main()
