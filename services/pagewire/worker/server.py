"""The worker process: start, readiness, drain, end."""

import asyncio
import gc
import logging
from functools import partial
from typing import NoReturn, TypeVar

from pagewire.config import WorkerConfig
from pagewire.lifecycle import logs
from pagewire.lifecycle.loop_lag import measure_loop_lag
from pagewire.lifecycle.metrics import count_tasks, serve_metrics
from pagewire.lifecycle.process import end_process, run_service
from pagewire.models import served_name
from pagewire.rpc.transport import Health, bind, make_server
from pagewire.v1 import worker_pb2_grpc
from pagewire.worker.protocol.auth import worker_credentials
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.health import WorkerHealth
from pagewire.worker.protocol.metrics import WorkerMetrics
from pagewire.worker.protocol.serial_thread import SerialThread
from pagewire.worker.protocol.service import LAST_WORDS_SECONDS, SERVICE_NAME, WorkerService
from pagewire.worker.protocol.worker_info import worker_info
from pagewire.worker.startup.compile_pool import CompilePool
from pagewire.worker.startup.loading import LoadedWorker, load_worker
from pagewire.worker.startup.timeline import Timeline

log = logging.getLogger(__name__)

T = TypeVar("T")

# The longest steps of a GPU are some tenths of a second.
GPU_UNREADY_SECONDS = 1.5


def run_worker(config: WorkerConfig, pool: CompilePool | None = None) -> None:
    """Serves until SIGTERM or SIGINT; SystemExit 1, with one line in the log, if it cannot.

    `pool` compiles kernels, if this worker has any; one started before this module is imported
    imports what it needs meanwhile.
    """
    logs.configure("worker", config.log_level)
    run_service(partial(_serve, config, pool))


async def _serve(config: WorkerConfig, pool: CompilePool | None, stop: asyncio.Event) -> None:
    timeline = Timeline()
    timeline.mark("imports")
    try:
        credentials = worker_credentials(config, config.worker_token_file, config.worker_address)
    except (OSError, ValueError) as error:
        _refuse_to_start(error)
    server = make_server(credentials)
    service, health = WorkerService(), Health(SERVICE_NAME)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    health.attach(server)
    await health.set_serving(False)
    launcher = SerialThread("launcher", end_process)
    instruments = WorkerMetrics()
    try:
        (port,) = bind(server, [config.worker_address], credentials)
        count_tasks()
        serve_metrics(config.metrics_host, config.worker_metrics_port)
        await server.start()
        loaded = await _unless(stop, launcher.call(partial(load_worker, config, pool, timeline)))
        if loaded is not None:
            await _unless(stop, launcher.call(loaded.backend.warm_up))
            # Collections while it serves then look at what came since, and end soon.
            gc.collect()
            gc.freeze()
            timeline.mark("warm-up")
    except Exception as error:
        _refuse_to_start(error)
    if loaded is None or stop.is_set():
        await server.stop(None)
        return
    if loaded.uses_triton:
        _watch_compilations(instruments)
    measure_loop_lag()  # not before: imports and the loading of weights hold the interpreter
    engine = StepExecutor(loaded.backend, launcher, instruments, end_process)
    name = served_name(config.model, config.served_model_name)
    info = worker_info(name, loaded.dtype, loaded.device, loaded.limits, loaded.backend)
    service.serve(engine, loaded.limits, info)
    _report(config, loaded, instruments, port, timeline)
    worker_health = WorkerHealth(health, service)
    usual = None if loaded.backend.synchronous else GPU_UNREADY_SECONDS
    watchdog = await worker_health.serve(
        engine, config.step_timeout, end_process, config.unready_after or usual
    )

    await stop.wait()
    log.info("draining, for %g s at most", config.drain_timeout)
    await worker_health.leave()
    await service.drain(config.drain_timeout)
    await server.stop(LAST_WORDS_SECONDS)
    watchdog.close()
    engine.close()
    log.info("stopped")


async def _unless(stop: asyncio.Event, work: asyncio.Future[T]) -> T | None:
    """What `work` returns; None as soon as `stop` is set."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return work.result() if work.done() else None


def _watch_compilations(instruments: WorkerMetrics) -> None:
    """Counts what the warm-up should have compiled."""
    from pagewire.worker.startup.compilations import on_compilation

    def report(kernel: str) -> None:
        instruments.late_compilations.inc()
        log.warning("kernel %s was compiled while serving; the warm-up has missed it", kernel)

    on_compilation(report)


def _report(
    config: WorkerConfig,
    loaded: LoadedWorker,
    instruments: WorkerMetrics,
    port: int,
    timeline: Timeline,
) -> None:
    backend, limits = loaded.backend, loaded.limits
    instruments.weight_bytes.set(backend.weight_bytes)
    instruments.kv_cache_bytes.set(backend.kv_cache_bytes)
    instruments.kv_cache_blocks.set(limits.num_blocks)
    instruments.host_blocks.set(limits.host_blocks)
    instruments.slots.set(limits.num_slots)
    address = config.worker_address
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{port}"  # the port may have been given as 0
    log.info(
        "ready on %s: %s, %s on %s, weights %.3f GB, %d blocks of %d tokens in %.3f GB, %d in the "
        "host's memory, %d slots, up to %d tokens, in %.1f s: %s",
        address,
        served_name(config.model, config.served_model_name),
        loaded.dtype,
        loaded.device,
        backend.weight_bytes / 1e9,
        limits.num_blocks,
        limits.block_size,
        backend.kv_cache_bytes / 1e9,
        limits.host_blocks,
        limits.num_slots,
        limits.max_model_len,
        timeline.seconds,
        timeline,
    )


def _refuse_to_start(error: Exception) -> NoReturn:
    log.error(
        "cannot start: %s", error, exc_info=error if log.isEnabledFor(logging.DEBUG) else None
    )
    raise SystemExit(1)
