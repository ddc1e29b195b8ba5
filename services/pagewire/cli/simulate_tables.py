"""The output of `pagewire simulate`: a table of its runs, and its comparisons."""

import sys
from typing import Any


def print_runs(title: str, ideal: float | None, runs: dict[str, dict[str, Any]]) -> None:
    """A table with a column for each run. `ideal` is the trace's best possible block hit rate."""
    from rich.console import Console
    from rich.table import Table

    if ideal is not None:
        title += f"; ideal block hit rate {ideal:.1%}"
    table = Table(title=title)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, cells in _rows(list(runs.values())):
        table.add_row(label, *cells)
    Console(width=None if sys.stdout.isatty() else 40 + 32 * len(runs)).print(table)


def _rows(runs: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    def row(label: str, form: str, *path: str) -> tuple[str, list[str]]:
        cells = []
        for run in runs:
            value: Any = run
            for part in path:
                value = value[part]
            cells.append("-" if value is None else format(value, form))
        return label, cells

    latencies = [
        row(f"{name} {p}, ms", ",.1f", f"{name.lower()}_ms", p)
        for name in ("TTFT", "TPOT")
        for p in ("mean", "p50", "p90", "p99")
    ]
    return [
        row("finished", ",", "finished"),
        row("refused as too large", ",", "refused"),
        row("seconds", ",.0f", "seconds"),
        row("output tokens/s", ",.0f", "output_tokens_per_second"),
        row("requests/s", ",.2f", "requests_per_second"),
        row("goodput, requests/s", ",.2f", "goodput_requests_per_second"),
        *latencies,
        row("block hit rate", ".1%", "block_hit_rate"),
        row("token hit rate", ".1%", "token_hit_rate"),
        row("  from the host", ".1%", "host_hit_rate"),
        row("device utilization", ".1%", "device_utilization"),
        row("KV utilization", ".1%", "kv_utilization"),
        row("  while requests wait", ".1%", "kv_utilization_under_pressure"),
        row("KV waste", ".2%", "kv_waste"),
        row("preemptions", ",", "preemptions"),
        row("blocks saved to the host", ",", "saved_blocks"),
        row("  loaded from there", ",", "loaded_blocks"),
        row("longest wait, s", ",.1f", "longest_wait_seconds"),
        row("longest pause, s", ",.1f", "longest_pause_seconds"),
    ]


def print_static(result: dict[str, Any]) -> None:
    """Prints the result of `compare_static`."""
    print(
        f"{result['requests']} requests at once, one worker, at most {result['batch_limit']} "
        "sequences\n"
        f"  continuous batching  {result['continuous_tokens_per_second']:10,.0f} output tokens/s\n"
        f"  static batching      {result['static_tokens_per_second']:10,.0f} output tokens/s: "
        f"continuous is {result['ratio']:.2f}x\n"
        f"  static, finished rows not computed "
        f"{result['static_without_finished_rows_tokens_per_second']:,.0f}: "
        f"{result['ratio_without_finished_rows']:.2f}x\n"
        f"With {result['pressure_blocks']} KV blocks, a fourth of what the batch needs\n"
        f"  KV utilization       {result['pressure_kv_utilization']:10.1%}\n"
        f"  KV waste             {result['pressure_kv_waste']:10.1%}\n"
        f"  throughput           {result['pressure_tokens_per_second']:10,.0f} output tokens/s, "
        f"{result['pressure_preemptions']} preemptions, {result['pressure_finished']} finished"
    )


def print_preemption(result: dict[str, Any]) -> None:
    """Prints the result of `compare_preemption`."""
    print(
        f"{result['requests']} requests at once, one worker with {result['blocks']} KV blocks, a "
        "fourth of what its batch needs"
    )
    for name, run in result.items():
        if not isinstance(run, dict):
            continue
        share = f", {run['of_best_plain_queue']:.0%}" if "of_best_plain_queue" in run else ""
        print(
            f"  {name:22} {run['output_tokens_per_second']:8,.0f} output tokens/s{share}; "
            f"{run['finished']} finished, {run['preemptions']} preemptions, "
            f"{run['saved_blocks']} blocks saved, {run['loaded_blocks']} loaded; longest wait "
            f"{run['longest_wait_seconds']:.0f} s, longest pause {run['longest_pause_seconds']:.1f}"
            " s"
        )
