"""Times the steps of a worker alone, without scheduler and gateway: free rows and constrained ones.

    python benchmarks/gpu/masked_steps.py --model DIR --load-format dummy --output FILE.jsonl

Runs of both kinds alternate, with steps sent four ahead. A first run of each warms up, so later
runs use filled lexer caches. The ratio is of medians. `mask processes` is the CPU time of all mask
processes for a step. Ends with status 1 if an output is not allowed. DIR needs only a config.json
and a tokenizer; the embedded model runs on a CPU.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.bench.schemas import LISTS
from pagewire.config import WorkerConfig
from pagewire.lifecycle.process import end_process
from pagewire.models import resolve_model
from pagewire.packing import pack, unpack
from pagewire.scheduler.structured.grammars import grammar_text
from pagewire.v1 import inference_pb2
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.constraints.grammars import compile_grammar, grammars_of
from pagewire.worker.protocol.constraints.mask_processes import MaskProcesses, default_processes
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.metrics import WorkerMetrics
from pagewire.worker.protocol.queue_thread import QueueThread
from pagewire.worker.protocol.session import Session
from pagewire.worker.startup.loading import load_worker

AHEAD = 4  # steps


def messages(
    rows: int, steps: int, prompt: int, block_size: int, constraint: pb.Constraint | None
) -> list[pb.Step]:
    """A step that prefills `rows` slots, and `steps` decode steps."""
    slots = list(range(rows))
    blocks = -(-(prompt + steps + 1) // block_size)
    first = pb.Step(
        step=1,
        append_slots=pack([slot for slot in slots for _ in range(blocks)]),
        append_blocks=pack(list(range(1, rows * blocks + 1))),
        prefill_slots=pack(slots),
        prefill_counts=pack([prompt] * rows),
    )
    for slot in slots:
        first.starts.append(
            pb.SequenceStart(
                slot=slot,
                token_ids=pack([300 + (7 * slot + i) % 900 for i in range(prompt)]),
                sampling=pb.SlotSampling(temperature=1, top_p=1, seed=slot + 1),
                constraint=constraint,
            )
        )
    others = [pb.Step(step=number + 2) for number in range(steps)]
    others[0].decode_slots = pack(slots)
    return [first, *others, pb.Step(step=steps + 2, decode_slots=b"")]


async def run(
    executor: StepExecutor, session: Session, steps: list[pb.Step]
) -> tuple[float, list[list[int]]]:
    """Seconds a step, without the first quarter of the steps, and the tokens of each step."""
    times, tokens = [], []
    for step in steps[:AHEAD]:
        executor.step(session, step)
    for number in range(len(steps)):
        answer = await session.answers.get()
        if not isinstance(answer, pb.StepResult) or answer.errors:
            sys.exit(f"step {number + 1} failed: {answer}")
        times.append(time.perf_counter())
        tokens.append(unpack(answer.token_ids).tolist())
        if number + AHEAD < len(steps):
            executor.step(session, steps[number + AHEAD])
    skipped = len(times) // 4
    return (times[-2] - times[skipped]) / (len(times) - 2 - skipped), tokens[:-1]


def cpu_seconds(masks: MaskProcesses) -> float:
    """CPU time of the mask processes so far."""
    children = Path(f"/proc/{masks.pid}/task/{masks.pid}/children").read_text().split()
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in children]
    return sum(int(s[11]) + int(s[12]) for s in stats) / os.sysconf("SC_CLK_TCK")


async def measure(options: argparse.Namespace) -> dict:
    """The figures by number of rows."""
    config = WorkerConfig(
        model=options.model, load_format=options.load_format, num_slots=max(options.rows)
    )
    launcher = QueueThread("launcher", end_process)
    loaded = await launcher.call(lambda: load_worker(config))
    limits, model = loaded.limits, resolve_model(config.model)
    grammars = grammars_of(model, limits.vocab_size)
    assert grammars is not None
    assert loaded.backend.mask_memory is not None
    await launcher.call(loaded.backend.warm_up)
    gc.freeze()
    executor = StepExecutor(
        loaded.backend, launcher, WorkerMetrics(CollectorRegistry()), end_process
    )
    processes = options.processes or default_processes()
    masks = MaskProcesses(loaded.backend.mask_memory, processes, end_process)
    masks.launch(config, model, None, limits.vocab_size)
    assert masks.ready()
    wanted = inference_pb2.StructuredOutput(json_schema=json.dumps(LISTS))
    grammar = grammar_text(wanted, grammars.tokenizer)
    constraint = pb.Constraint(grammar=grammar, end_token_ids=grammars.tokenizer.eos_tokens)
    figures = {}
    for rows in options.rows:
        prompt = min(16, limits.max_num_batched_tokens // rows)
        times: dict[str, list[float]] = {"free": [], "constrained": [], "mask processes": []}
        for number in range(-1, options.rounds):
            for kind in ("free", "constrained"):
                given = constraint if kind == "constrained" else None
                steps = messages(rows, options.steps, prompt, limits.block_size, given)
                session = Session(number + 2, limits, masks, row_costs=executor.row_costs)
                began = cpu_seconds(masks)
                seconds, tokens = await run(executor, session, steps)
                if number >= 0:
                    times[kind].append(1e3 * seconds)
                if given is None:
                    continue
                if number >= 0:
                    times["mask processes"].append(1e3 * (cpu_seconds(masks) - began) / len(steps))
                matcher = compile_grammar(grammars.tokenizer, grammar)
                for output in zip(*tokens, strict=True):
                    if matcher.deep_copy().validate_tokens(list(output)) != len(output):
                        sys.exit(f"the grammar does not allow the output {output}")
        medians = {kind: {"ms": statistics.median(each)} for kind, each in times.items()}
        ratio = medians["constrained"]["ms"] / medians["free"]["ms"]
        figures[f"{rows} rows"] = {**medians, "ratio": ratio}
        print(rows, json.dumps({**times, "ratio": ratio}), flush=True)
    await asyncio.to_thread(executor.close)
    masks.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--load-format", default="safetensors", choices=("safetensors", "dummy"))
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=150, help="of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, help="that compute masks")
    parser.add_argument("--output", type=Path, help="write the figures as rows")
    options = parser.parse_args()
    figures = asyncio.run(measure(options))
    if options.output:
        write_rows(options.output, figures_of(figures, "masked-steps"), command_line())


if __name__ == "__main__":
    main()
