"""Curves over time as an SVG file: a panel for each quantity, a colour for each run."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Curve = Sequence[float | None]

_WIDTH, _HEIGHT = 760, 130
_LEFT, _TOP, _GAP = 90, 40, 46
_COLOURS = ("#1f6fb4", "#d9541e", "#2a9d4a", "#8a4fb0", "#b8860b", "#555555")


def plot_svg(
    title: str, panels: Mapping[str, Mapping[str, Curve]], seconds: Mapping[str, Sequence[float]]
) -> str:
    """An SVG document.

    `panels` has the curves by panel title and run name, `seconds` the times of each run. None is a
    gap in a curve. Every vertical axis begins at 0.
    """
    runs = list(seconds)
    latest = max((times[-1] for times in seconds.values()), default=1.0)
    height = _TOP + len(panels) * (_HEIGHT + _GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-size="14">{escape(title)}</text>',
    ]
    for index, run in enumerate(runs):
        x = _LEFT + index * (_WIDTH / len(runs))
        parts.append(
            f'<rect x="{x:.0f}" y="24" width="10" height="10" fill="{_colour(index)}"/>'
            f'<text x="{x + 14:.0f}" y="33">{escape(run)}</text>'
        )
    for row, (name, curves) in enumerate(panels.items()):
        top = _TOP + row * (_HEIGHT + _GAP) + 18
        parts += _panel(name, top, latest, curves, seconds, runs)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    name: str,
    top: float,
    latest: float,
    curves: Mapping[str, Curve],
    seconds: Mapping[str, Sequence[float]],
    runs: list[str],
) -> list[str]:
    limit = _round_up(
        max((v for curve in curves.values() for v in curve if v is not None), default=1)
    )
    bottom = top + _HEIGHT
    parts = [f'<text x="{_LEFT}" y="{top - 5}" font-size="12">{escape(name)}</text>']
    for part in range(5):
        y, value = bottom - _HEIGHT * part / 4, limit * part / 4
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.4g}</text>'
        )
    for part in range(7):
        x = _LEFT + _WIDTH * part / 6
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">'
            f"{latest / 60 * part / 6:.3g} min</text>"
        )
    for run, curve in curves.items():
        points = [
            None if v is None else (_LEFT + _WIDTH * t / latest, bottom - _HEIGHT * v / limit)
            for t, v in zip(seconds[run], curve, strict=True)
        ]
        colour = _colour(runs.index(run))
        parts.append(f'<path d="{_path(points)}" fill="none" stroke="{colour}"/>')
    return parts


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """SVG path data; None is a gap."""
    steps, down = [], False
    for point in points:
        if point is not None:
            steps.append(f"{'L' if down else 'M'}{point[0]:.1f},{point[1]:.1f}")
        down = point is not None
    return " ".join(steps)


def _round_up(value: float) -> float:
    """The next number that is 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= value * 0.999999)


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
