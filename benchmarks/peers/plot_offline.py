"""Draw the offline throughput relative to vLLM, from the rows of both engines.

    python benchmarks/peers/plot_offline.py [--output FILE.svg]

A bar is Pagewire's best rate of a workload in `results/serving-h200.jsonl` over vLLM's in
`peers/vllm/results-h200.jsonl`.
"""

import argparse
from pathlib import Path

from pagewire.bench.results import read_rows, write_file

HERE = Path(__file__).parents[1]
PAGEWIRE = HERE / "results" / "serving-h200.jsonl"
VLLM = HERE / "peers" / "vllm" / "results-h200.jsonl"
PLOT = HERE / "results" / "plots" / "offline-h200.svg"

WORKLOADS = ("single", "mixed256", "fixed512", "prefill_heavy", "shared_prefix")
MODELS = {"qwen3-0.6b": ("Qwen3-0.6B", "#3465a4"), "llama-3.1-8b": ("Llama-3.1-8B", "#e08a1e")}
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, BOTTOM, TOP = 48, 710, 250, 40
HIGHEST = 4
BAR, GAP = 42, 4


def rates(path: Path) -> dict[str, float]:
    """The highest rate of each model and workload, by `model/workload`."""
    found: dict[str, float] = {}
    for row in read_rows(path):
        name = row.name.removesuffix("/tokens_per_second")
        if name != row.name:
            found[name] = max(found.get(name, 0.0), row.value)
    return found


def ratios() -> dict[str, dict[str, float]]:
    """Pagewire over vLLM, by workload and model."""
    ours, theirs = rates(PAGEWIRE), rates(VLLM)
    return {
        workload: {
            model: ours[f"{model}/{workload}"] / theirs[f"{model}/{workload}"] for model in MODELS
        }
        for workload in WORKLOADS
    }


def text(x: float, y: float, content: str, **attributes: object) -> str:
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{given}>{content}</text>'


def height(ratio: float) -> float:
    return ratio * (BOTTOM - TOP) / HIGHEST


def svg(bars: dict[str, dict[str, float]]) -> str:
    """The plot as an SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, "Offline throughput on one H200, relative to vLLM 0.26.0", font_size=14),
    ]
    for ratio in range(HIGHEST + 1):
        y, colour = BOTTOM - height(ratio), "#444" if ratio == 1 else "#ddd"
        parts.append(f'<line x1="{LEFT}" y1="{y:g}" x2="{RIGHT}" y2="{y:g}" stroke="{colour}"/>')
        parts.append(text(LEFT - 8, y + 4, str(ratio), text_anchor="end"))
    step = (RIGHT - LEFT) / len(bars)
    for group, (workload, by_model) in enumerate(bars.items()):
        middle = LEFT + (group + 0.5) * step
        for index, (model, speedup) in enumerate(by_model.items()):
            x = middle - BAR - GAP / 2 + index * (BAR + GAP)
            y = BOTTOM - height(speedup)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{BAR}" height="{height(speedup):.1f}" '
                f'fill="{MODELS[model][1]}"/>'
            )
            at = round(x + BAR / 2, 1), round(y - 4, 1)
            parts.append(text(*at, f"{speedup:.2f}", text_anchor="middle"))
        parts.append(text(round(middle, 1), BOTTOM + 18, workload, text_anchor="middle"))
    for index, (name, colour) in enumerate(MODELS.values()):
        x = LEFT + index * 110
        parts.append(f'<rect x="{x}" y="280" width="10" height="10" fill="{colour}"/>')
        parts.append(text(x + 14, 289, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PLOT)
    write_file(parser.parse_args().output, svg(ratios()))


if __name__ == "__main__":
    main()
