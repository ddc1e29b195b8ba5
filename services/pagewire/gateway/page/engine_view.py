"""The engine's state for the page, as JSON: this gateway, its schedulers and their snapshots."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client import Histogram
from starlette.requests import Request
from starlette.responses import Response

from pagewire.errors import RequestError
from pagewire.gateway.errors import ApiError
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.page.viewers import Viewers
from pagewire.gateway.routing.link import Link
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.v1 import snapshot_pb2 as pb

EVENTS_PATH = "/engine/events"
MAX_SCHEDULERS = 32
_CALL_SECONDS = 2.0
# A cell's state as a digit.
_DIGITS = bytes(48 + value % 10 for value in range(256))


class EngineView:
    """Requests snapshots from the schedulers while the page has viewers."""

    def __init__(self, schedulers: Schedulers, metrics: GatewayMetrics) -> None:
        self._schedulers = schedulers
        self._metrics = metrics
        self._steps_seen: dict[str, tuple[str, int]] = {}  # by target: the process, and its step
        self.viewers = Viewers(self._text)

    async def events(self, request: Request) -> Response:
        """The engine once a second, as server-sent events."""
        try:
            return self.viewers.response()
        except ApiError as error:
            error.headers = {"retry-after": "5"}
            raise

    async def busiest_worker(self, model: str | None = None) -> str | None:
        """The address of the worker with the most requests, of one model or of all; None if no
        scheduler shows one."""
        known = self._schedulers.links.values()
        links = [link for link in known if model is None or model in link.models][:MAX_SCHEDULERS]
        snapshots = await asyncio.gather(*(self._ask(link, 0) for link in links if link.connected))
        workers = [worker for snapshot in snapshots if snapshot for worker in snapshot.workers]
        busiest = max(workers, key=lambda worker: worker.num_running, default=None)
        return None if busiest is None else busiest.address

    async def _text(self) -> str:
        links = [*self._schedulers.links.values()][:MAX_SCHEDULERS]
        schedulers = await asyncio.gather(*(self._scheduler(link) for link in links))
        metrics = self._metrics
        gateway = {
            "viewers": self.viewers.count,
            "first_token": _sum_and_count(metrics.time_to_first_token),
            "per_token": _sum_and_count(metrics.time_per_output_token),
        }
        state = {"gateway": gateway, "schedulers": schedulers}
        return json.dumps(state, separators=(",", ":"))

    async def _scheduler(self, link: Link) -> dict[str, Any]:
        load = link.load
        return {
            "target": link.target,
            "models": sorted(link.models),
            "state": _state(link),
            "open": link.num_open,
            "waiting": load.waiting,
            "running": load.running,
            "used_blocks": load.used_blocks,
            "total_blocks": load.total_blocks,
            "preemptions": load.preemptions,
            "snapshot": await self._snapshot(link) if link.connected else None,
        }

    async def _snapshot(self, link: Link) -> dict[str, Any] | None:
        process, steps = self._steps_seen.get(link.target, ("", 0))
        snapshot = await self._ask(link, steps if process == link.instance else 0)
        if snapshot is None:
            return None
        self._steps_seen[link.target] = snapshot.instance_id, snapshot.steps.last
        return snapshot_json(snapshot)

    async def _ask(self, link: Link, steps_after: int) -> pb.Snapshot | None:
        """None if the scheduler does not answer, or is older than this call."""
        request = pb.SnapshotRequest(steps_after=steps_after).SerializeToString()
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                return pb.Snapshot.FromString(await link.call("GetSnapshot", request))
        except (RequestError, TimeoutError):
            return None


def snapshot_json(snapshot: pb.Snapshot) -> dict[str, Any]:
    """A snapshot as the page reads it: tables stay in columns, maps become digits."""
    steps, requests = snapshot.steps, snapshot.requests
    return {
        "now": round(snapshot.now, 4),
        "num_workers": snapshot.num_workers,
        "output_tokens": snapshot.output_tokens,
        "prompt_tokens": snapshot.prompt_tokens,
        "cached_tokens": snapshot.cached_tokens,
        "workers": [_worker(worker) for worker in snapshot.workers],
        "steps": {
            "workers": [*steps.workers],
            "ended": [round(time, 4) for time in steps.ended],
            "durations": [*steps.durations],
            "decodes": [*steps.decodes],
            "prefills": [*steps.prefills],
            "copies": [*steps.copies],
        },
        "requests": {
            "ids": [*requests.ids],
            "phases": [*requests.phases],
            "workers": [*requests.workers],
            "prompt": [*requests.prompt_tokens],
            "computed": [*requests.computed_tokens],
            "output": [*requests.output_tokens],
            "max": [*requests.max_tokens],
            "cached": [*requests.cached_tokens],
        },
        "gateways": [
            {"peer": gateway.peer, "open": gateway.num_open, "this": gateway.asks}
            for gateway in snapshot.gateways
        ],
    }


def _worker(worker: pb.WorkerSnapshot) -> dict[str, Any]:
    tree = worker.tree
    return {
        "address": worker.address,
        "device": worker.device,
        "dtype": worker.dtype,
        "draining": worker.draining,
        "slots": worker.num_slots,
        "running": worker.num_running,
        "block_size": worker.block_size,
        "blocks": _block_map(worker.device_blocks),
        "host": _block_map(worker.host_blocks) if worker.HasField("host_blocks") else None,
        "tree": {
            "parents": [*tree.parents],
            "blocks": [*tree.blocks],
            "on_device": [*tree.on_device],
            "hits": [*tree.hits],
            "holders": [*tree.holders],
            "total": tree.num_nodes,
        },
    }


def _block_map(blocks: pb.BlockMap) -> dict[str, Any]:
    cells = blocks.cells.translate(_DIGITS).decode()
    return {"cells": cells, "per_cell": blocks.blocks_per_cell, "counts": [*blocks.counts]}


def _state(link: Link) -> str:
    if not link.connected:
        return "lost"
    if link.draining:
        return "draining"
    return "ready" if link.ready else "no worker"


def _sum_and_count(histogram: Histogram) -> tuple[float, int]:
    """The sum in seconds and the number of all observations since the start."""
    samples: Iterable[Any] = (s for metric in histogram.collect() for s in metric.samples)
    values: Counter[str] = Counter()
    for sample in samples:  # of each model
        values[sample.name.rpartition("_")[2]] += sample.value
    return round(values["sum"], 4), int(values["count"])
