"""Recompute all simulated figures: `simulate-*.jsonl` and the plot of routing.

    python benchmarks/simulations.py --traces DIR [--only mooncake-routing,azure-static]

DIR holds `mooncake_conversation.jsonl` (kvcache-ai/Mooncake, FAST25-release/traces) and
`azure_llm_2023_conv.csv` (Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv). All six need
about a quarter of an hour on two cores. A replay is deterministic: the same commit gives the same
figures on any machine.
"""

import argparse
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MOONCAKE = "mooncake_conversation.jsonl"
AZURE = "azure_llm_2023_conv.csv"
PREEMPTION = ["--requests", "4000", "--compare-preemption", "--host-memory-gb", "20"]

# By name: the trace, and the flags of `pagewire simulate`.
SIMULATIONS = {
    "mooncake-routing": (
        MOONCAKE,
        ["--workers", "4", "--routing", "prefix-aware,round-robin", "--block-size", "512"],
    ),
    "mooncake-host": (MOONCAKE, ["--workers", "4", "--host-memory-gb", "0,100"]),
    "mooncake-cache": (
        MOONCAKE,
        ["--profile", "h200-qwen3-0.6b", "--block-size", "512", "--cache-blocks", "0,16384,2213"],
    ),
    "azure-preemption": (AZURE, [*PREEMPTION, "--memory-threshold", "1.0"]),
    "azure-preemption-threshold-0.9": (AZURE, PREEMPTION),
    "azure-static": (AZURE, ["--compare-static", "--memory-threshold", "0.98"]),
}
PLOTS = {"mooncake-routing": "routing-mooncake.svg"}


def command(name: str, traces: Path) -> list[str]:
    """The command line of a simulation, after `pagewire`."""
    trace, flags = SIMULATIONS[name]
    words = ["simulate", "--trace", str(traces / trace), *flags]
    if name in PLOTS:
        words += ["--plot", str(RESULTS / "plots" / PLOTS[name])]
    return [*words, "--output", str(RESULTS / f"simulate-{name}.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--only", default=",".join(SIMULATIONS), help="separated by commas")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = set(names) - set(SIMULATIONS)
    if unknown:
        parser.error(f"{min(unknown)!r} is none of {', '.join(SIMULATIONS)}")
    for name in names:
        words = command(name, options.traces)
        print("pagewire", *words, flush=True)
        subprocess.run([sys.executable, "-m", "pagewire.cli.main", *words], check=True)


if __name__ == "__main__":
    main()
