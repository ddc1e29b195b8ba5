"""The Grafana dashboard of deploy/observability, from a table of panels.

python tools/dashboard.py            writes it
python tools/dashboard.py --check    exits with status 1 if it is not that of the table
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "deploy/observability/grafana/dashboards/pagewire.json"
COMMAND = "python tools/dashboard.py"

# As in grafana/provisioning/datasources.
SOURCE = {"type": "prometheus", "uid": "pagewire-prometheus"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
G, S, W = "pagewire_gateway", "pagewire_scheduler", "pagewire_worker"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: its title, the unit of its values, and its expressions by legend."""

    title: str
    unit: str
    queries: dict[str, str]


def rate(metric: str, by: str = "") -> str:
    """The rate of a counter over all processes, or by some labels."""
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}[$__rate_interval]))"


def quantiles(metric: str) -> dict[str, str]:
    """Median, 95th and 99th percentile of a histogram over all processes."""
    buckets = rate(f"{metric}_bucket", "le")
    return {f"p{q}": f"histogram_quantile(0.{q}, {buckets})" for q in (50, 95, 99)}


ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel(  # requests of clients, without readiness probes and scrapes
            "Requests by outcome",
            "reqps",
            {"{{outcome}}": rate(f'{G}_requests_total{{route=~"/v1/.+"}}', "outcome")},
        ),
        Panel("Time to first token", "s", quantiles(f"{G}_time_to_first_token_seconds")),
        Panel("Time per output token", "s", quantiles(f"{G}_time_per_output_token_seconds")),
        Panel("Duration of a generation", "s", quantiles(f"{G}_generation_seconds")),
        Panel("Time of a refusal", "s", quantiles(f"{G}_refusal_seconds")),
        Panel("Open HTTP requests", "short", {"{{instance}}": f"{G}_open_requests"}),
    ],
    "Load": [
        Panel(
            "Tokens",
            "short",
            {
                "prompt tokens/s": rate(f"{S}_prompt_tokens_total"),
                "output tokens/s": rate(f"{S}_output_tokens_total"),
            },
        ),
        Panel("Requests by state", "short", {"{{state}}": f"sum by (state) ({S}_open_requests)"}),
        Panel("Queue wait", "s", quantiles(f"{S}_queue_seconds")),
        Panel(
            "KV blocks in use",
            "percentunit",
            {
                "device {{instance}}": f'{S}_blocks{{state="used"}} '
                f'/ ignoring (state) {S}_blocks{{state="total"}}',
                "waste {{instance}}": f"{S}_kv_waste",
            },
        ),
        Panel(
            "Prompt tokens from the prefix cache",
            "percentunit",
            {"hits": f"{rate(f'{S}_cached_tokens_total')} / {rate(f'{S}_prompt_tokens_total')}"},
        ),
        Panel(
            "KV blocks moved to and from host memory",
            "short",
            {
                "saved/s": rate(f"{S}_saved_blocks_total"),
                "loaded/s": rate(f"{S}_loaded_blocks_total"),
            },
        ),
    ],
    "Failures and recovery": [
        Panel("Ready workers", "short", {"{{instance}}": f"{S}_ready_workers"}),
        Panel(
            "Losses and continued requests",
            "short",
            {
                "workers lost/s": rate(f"{S}_worker_losses_total"),
                "handed back/s": rate(f"{S}_handed_back_total"),
                "resumed/s": rate(f"{G}_resumed_total"),
            },
        ),
        Panel(
            "Preemptions",
            "short",
            {
                "preempted/s": rate(f"{S}_preemptions_total"),
                "again, {{kind}}/s": rate(f"{S}_preempted_returns_total", "kind"),
            },
        ),
    ],
    "Processes": [
        Panel("Step time at the workers", "s", quantiles(f"{W}_step_seconds")),
        Panel("Tokens computed", "short", {"{{phase}}": rate(f"{W}_tokens_total", "phase")}),
        Panel(
            "Tokens drafted by speculation",
            "short",
            {
                "{{drafter}}, {{outcome}}/s": rate(f"{S}_drafts_total", "drafter, outcome"),
            },
        ),
        Panel("Sequences in a step", "short", {"{{instance}}": f"{W}_slots_in_use"}),
        Panel(
            "Loop lag, 99th percentile",
            "s",
            {
                "{{job}} {{instance}}": "histogram_quantile(0.99, "
                + rate('pagewire_loop_lag_seconds_bucket{cause="loop"}', "le, job, instance")
                + ")"
            },
        ),
        Panel(
            "CPU",
            "percentunit",
            {"{{job}} {{instance}}": "rate(process_cpu_seconds_total[$__rate_interval])"},
        ),
        Panel("Memory", "bytes", {"{{job}} {{instance}}": "process_resident_memory_bytes"}),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        for place, panel in enumerate(row):
            x = place % COLUMNS * WIDTH
            panels.append(_panel(len(panels) + 1, panel, x, y + place // COLUMNS * HEIGHT))
        y += -(-len(row) // COLUMNS) * HEIGHT
    return {
        "uid": "pagewire",
        "title": "Pagewire",
        "tags": ["pagewire"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": panels,
    }


def expressions() -> list[str]:
    """Every expression of the dashboard."""
    return [query for row in ROWS.values() for panel in row for query in panel.queries.values()]


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": WIDTH * COLUMNS, "x": 0, "y": y}
    return {
        "id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place,
        "panels": [],
    }  # fmt: skip


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for n, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> None:
    """Writes the file, or compares it."""
    if "--check" not in sys.argv:
        PAGE.write_text(text(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text():
        sys.exit(f"{PAGE} is not the dashboard of the table: run {COMMAND}")


if __name__ == "__main__":
    main()
