"""The process of simulated workers: one or more complete worker services.

Protocol, epochs, checks of slots and the order of answers are the real worker's code. Only the
backend differs.
"""

import asyncio
import logging
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import grpc

from pagewire.config import SimulatedWorkerConfig
from pagewire.lifecycle import logs
from pagewire.lifecycle.loop_lag import measure_loop_lag
from pagewire.lifecycle.metrics import count_tasks, serve_metrics
from pagewire.lifecycle.process import end_process, run_service
from pagewire.lifecycle.watchdog import Watchdog
from pagewire.models import resolve_model, served_name
from pagewire.rpc.transport import Health, bind, make_server
from pagewire.simulator.addresses import addresses_of
from pagewire.simulator.backend import SimulatedBackend
from pagewire.simulator.profile import Profile, load_profile
from pagewire.tracing.start import start_tracing
from pagewire.v1 import worker_pb2_grpc
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import read_model_config
from pagewire.worker.protocol.auth import worker_credentials
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.health import WorkerHealth
from pagewire.worker.protocol.metrics import WorkerMetrics
from pagewire.worker.protocol.queue_thread import SWITCH_INTERVAL, QueueThread
from pagewire.worker.protocol.service import SERVICE_NAME, SHUTDOWN_SECONDS, WorkerService
from pagewire.worker.protocol.steps.limits import Limits, fit_to_pool, kept_window
from pagewire.worker.protocol.worker_info import worker_info

if TYPE_CHECKING:
    from pagewire.tracing.otel import Tracing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """One of the workers: its server, service, health and watchdog."""

    server: grpc.aio.Server
    service: WorkerService
    health: WorkerHealth
    watchdog: Watchdog
    address: str


def run_simulated_worker(config: SimulatedWorkerConfig) -> None:
    """Serves until SIGTERM or SIGINT; exits with status 1 and one line if it cannot start."""
    logs.configure("worker", config.log_level, config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        run_service(partial(_serve, config))
    except (OSError, RuntimeError, ValueError, SetupError) as error:
        log.debug("the simulated worker cannot start", exc_info=True)
        sys.exit(f"pagewire simulated-worker: {error}")


async def _serve(config: SimulatedWorkerConfig, stop: asyncio.Event) -> None:
    profile = load_profile(config.profile)
    limits = _limits(config, profile)
    # All workers plan on one thread, because planning takes microseconds. Each worker waits for its
    # steps on a thread of its own.
    launcher = QueueThread("launcher", end_process)
    metrics = WorkerMetrics()
    tracing = start_tracing(config, "worker")
    kv_cache_bytes = limits.num_blocks * limits.block_size * profile.kv_bytes_per_token
    workers, executors = [], []
    for address in addresses_of(config.worker_address, config.count):
        backend = SimulatedBackend(
            limits,
            profile.step_time,
            config.speedup,
            profile.weight_bytes,
            kv_cache_bytes,
            profile.host_costs(limits.block_size) if limits.host_blocks else None,
        )
        executors.append(StepExecutor(backend, launcher, metrics, end_process))
        workers.append(await _start(config, address, executors[-1], backend, limits, tracing))
    metrics.set_sizes(limits, profile.weight_bytes, kv_cache_bytes, len(workers))
    count_tasks()
    measure_loop_lag()
    serve_metrics(config.metrics_host, config.worker_metrics_port)
    log.info(
        "ready on %s: %s simulated as %s, speed-up %s, %d blocks of %d tokens, %d in host memory, "
        "%d slots, up to %d tokens",
        ", ".join(worker.address for worker in workers),
        served_name(config.model, config.served_model_name),
        profile.name,
        f"{config.speedup:g}" if config.speedup else "unlimited",
        limits.num_blocks,
        limits.block_size,
        limits.host_blocks,
        limits.num_slots,
        limits.max_model_len,
    )
    await stop.wait()
    log.info("draining, for %g s at most", config.drain_timeout)
    await asyncio.gather(*(_drain(worker, config.drain_timeout) for worker in workers))
    for executor in executors:
        executor.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    log.info("stopped")


async def _start(
    config: SimulatedWorkerConfig,
    address: str,
    executor: StepExecutor,
    backend: SimulatedBackend,
    limits: Limits,
    tracing: "Tracing | None",
) -> SimulatedWorker:
    credentials = worker_credentials(config, config.worker_token_file, address)
    server = make_server(credentials)
    service, health = WorkerService(), Health(SERVICE_NAME)
    service.tracing = tracing
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    health.attach(server)
    (port,) = bind(server, [address], credentials)
    await server.start()
    name = served_name(config.model, config.served_model_name)
    info = worker_info(name, "bfloat16", f"simulated {config.profile}", limits, backend)
    service.serve(executor, limits, info)
    worker_health = WorkerHealth(health, service)
    watchdog = await worker_health.serve(executor, config.step_timeout, end_process)
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{port}"  # the port may have been given as 0
    return SimulatedWorker(server, service, worker_health, watchdog, address)


async def _drain(worker: SimulatedWorker, seconds: float) -> None:
    await worker.health.drain()
    await worker.service.drain(seconds)
    await worker.server.stop(SHUTDOWN_SECONDS)
    worker.watchdog.close()


def _limits(config: SimulatedWorkerConfig, profile: Profile) -> Limits:
    """As for a real worker, but --max-model-len may exceed the model's trained length."""
    model = read_model_config(resolve_model(config.model))
    num_blocks = config.num_blocks or profile.blocks(config.block_size)
    block_bytes = config.block_size * profile.kv_bytes_per_token
    host_blocks = profile.host_blocks(config.host_memory_gb, config.block_size)
    if config.host_memory_gb and not host_blocks:
        raise SetupError(
            f"--host-memory-gb {config.host_memory_gb:g} does not hold one block of "
            f"{block_bytes / 1e9:.6f} GB; give more, or 0 for none"
        )
    longest = config.max_model_len or model.max_position_embeddings
    window = kept_window(model.windows, longest, host_blocks)
    return Limits(
        vocab_size=model.vocab_size,
        num_slots=config.num_slots,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=fit_to_pool(
            longest, config.max_model_len, num_blocks, config.block_size, block_bytes, window
        ),
        max_num_batched_tokens=(
            config.worker_max_num_batched_tokens or profile.max_num_batched_tokens
        ),
        host_blocks=host_blocks,
        window=window,
    )
