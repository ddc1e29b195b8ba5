"""The worker process: its start, readiness, drain and end."""

import asyncio
import gc
import logging
import os
import sys
from functools import partial
from typing import NoReturn, TypeVar

from pagewire.config import WorkerConfig
from pagewire.lifecycle import logs
from pagewire.lifecycle.loop_lag import measure_loop_lag
from pagewire.lifecycle.metrics import count_tasks, serve_metrics
from pagewire.lifecycle.process import end_process, run_service
from pagewire.lifecycle.watchdog import Watchdog
from pagewire.models import resolve_model, resolve_tokenizer, served_name
from pagewire.rpc.transport import Health, bind, make_server, stop_server
from pagewire.tracing.start import start_tracing
from pagewire.v1 import worker_pb2_grpc
from pagewire.worker.errors import SetupError
from pagewire.worker.protocol.auth import worker_credentials
from pagewire.worker.protocol.backend import LoadedWorker
from pagewire.worker.protocol.constraints.mask_processes import MaskProcesses, default_processes
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.health import WorkerHealth
from pagewire.worker.protocol.metrics import WorkerMetrics
from pagewire.worker.protocol.queue_thread import SWITCH_INTERVAL, QueueThread
from pagewire.worker.protocol.service import SERVICE_NAME, SHUTDOWN_SECONDS, WorkerService
from pagewire.worker.protocol.worker_info import worker_info
from pagewire.worker.startup.compile_pool import CompilePool
from pagewire.worker.startup.phases import StartupPhases

log = logging.getLogger(__name__)

T = TypeVar("T")

# A GPU step takes tenths of a second at most. A longer one makes the worker unready.
GPU_UNREADY_SECONDS = 1.5


def run_worker(config: WorkerConfig, pool: CompilePool | None = None) -> None:
    """Serves until SIGTERM or SIGINT. If it cannot start, it logs one line and raises SystemExit 1.

    `pool` compiles kernels if this worker needs any. Callers start the pool before they import
    this module, so that both import at the same time.
    """
    logs.configure("worker", config.log_level, config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL)
    run_service(partial(_serve, config, pool))


async def _serve(config: WorkerConfig, pool: CompilePool | None, stop: asyncio.Event) -> None:
    phases = StartupPhases()
    phases.end("imports")
    try:
        credentials = worker_credentials(config, config.worker_token_file, config.worker_address)
        tracing = start_tracing(config, "worker")
    except (OSError, ValueError) as error:
        _refuse_to_start(error)
    server = make_server(credentials)
    service, health = WorkerService(), Health(SERVICE_NAME)
    service.tracing = tracing
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    health.attach(server)
    await health.set_serving(False)
    launcher = QueueThread("launcher", end_process)
    metrics = WorkerMetrics()
    watchdog = _watch_start(config, phases)
    masks: MaskProcesses | None = None
    try:
        (port,) = bind(server, [config.worker_address], credentials)
        count_tasks()
        serve_metrics(config.metrics_host, config.worker_metrics_port)
        await server.start()
        loaded = await _unless(stop, launcher.call(partial(_load, config, pool, phases)))
        if loaded is not None:
            masks = _mask_processes(config, loaded)
            await _unless(stop, launcher.call(loaded.backend.warm_up))
            # Later collections skip the objects that exist now, so they are short.
            gc.collect()
            gc.freeze()
            phases.end("warm-up")
            if masks is not None:
                if not await asyncio.to_thread(masks.ready):
                    masks = None
                phases.end("mask processes")
    except Exception as error:
        await stop_server(server)
        _refuse_to_start(error)
    finally:
        watchdog.close()
    if loaded is None or stop.is_set():
        await stop_server(server)
        _end_while_starting(config)
        return
    if loaded.uses_triton:
        _watch_compilations(metrics)
    measure_loop_lag()  # not earlier: imports and loading weights block the interpreter
    executor = StepExecutor(loaded.backend, launcher, metrics, end_process)
    name = served_name(config.model, config.served_model_name)
    info = worker_info(
        name,
        loaded.dtype,
        loaded.device,
        loaded.limits,
        loaded.backend,
        constraints=masks is not None,
        batch_invariant=loaded.batch_invariant,
    )
    service.serve(executor, loaded.limits, info, masks)
    _report(config, loaded, metrics, port, phases)
    worker_health = WorkerHealth(health, service)
    on_gpu = config.backend == "torch" and not loaded.backend.synchronous
    default = GPU_UNREADY_SECONDS if on_gpu else None
    watchdog = await worker_health.serve(
        executor, config.step_timeout, end_process, config.unready_after or default
    )

    await stop.wait()
    log.info("draining for at most %g s; a second signal ends it at once", config.drain_timeout)
    await worker_health.drain()
    await service.drain(config.drain_timeout)
    await stop_server(server, SHUTDOWN_SECONDS)
    watchdog.close()
    executor.close()
    if masks is not None:
        masks.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    log.info("stopped")


def _load(config: WorkerConfig, pool: CompilePool | None, phases: StartupPhases) -> LoadedWorker:
    """Loads the backend, and imports only what it needs: a program needs no torch."""
    if config.backend == "command":
        from pagewire.worker.command.loading import load_command

        loaded = load_command(config)
        phases.end("program")
        return loaded
    if config.command is not None:
        raise SetupError("--command needs --backend command; add it or leave --command out")
    from pagewire.worker.startup.loading import load_worker

    return load_worker(config, pool, phases)


def _mask_processes(config: WorkerConfig, loaded: LoadedWorker) -> MaskProcesses | None:
    """Starts the processes that compute masks; None if this worker needs none."""
    memory = loaded.backend.mask_memory
    if memory is None or not config.structured_output:
        return None
    masks = MaskProcesses(memory, config.mask_processes or default_processes(), end_process)
    tokenizer = resolve_tokenizer(config.model, config.tokenizer)
    masks.launch(config, resolve_model(config.model), tokenizer, loaded.limits.vocab_size)
    return masks


def _end_while_starting(config: WorkerConfig) -> None:
    """Ends the process without the interpreter's shutdown, which aborts a thread inside torch."""
    log.info("stopped before it was ready")
    if config.backend == "torch":  # atexit ends the program of a command worker
        logging.shutdown()
        os._exit(0)


async def _unless(stop: asyncio.Event, work: asyncio.Future[T]) -> T | None:
    """The result of `work`; None if `stop` is set first."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return work.result() if work.done() else None


def _watch_start(config: WorkerConfig, phases: StartupPhases) -> Watchdog:
    """Ends a process whose start makes no progress: a kernel that hangs cannot be cancelled."""

    def report(moving: bool) -> None:
        if not moving:
            log.critical("done before it stalled: %s", phases)

    seconds = config.start_phase_timeout
    if config.backend == "command":  # this backend limits the start of its program itself
        seconds = max(seconds, config.command_start_timeout)
    return Watchdog([phases.watched()], seconds, end_process, report)


def _watch_compilations(metrics: WorkerMetrics) -> None:
    """Counts and logs kernels that are compiled from now on; the warm-up should load them all."""
    from pagewire.worker.startup.triton_hooks import on_compilation

    def report(kernel: str) -> None:
        metrics.late_compilations.inc()
        log.warning("kernel %s was compiled while serving; the warm-up did not load it", kernel)

    on_compilation(report)


def _report(
    config: WorkerConfig,
    loaded: LoadedWorker,
    metrics: WorkerMetrics,
    port: int,
    phases: StartupPhases,
) -> None:
    backend, limits = loaded.backend, loaded.limits
    metrics.set_sizes(limits, backend.weight_bytes, backend.kv_cache_bytes)
    address = config.worker_address
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{port}"  # the port may have been given as 0
    log.info(
        "ready on %s: %s, %s on %s, weights %.3f GB, %d blocks of %d tokens in %.3f GB%s, %d "
        "blocks in the host's memory, %d slots, up to %d tokens a sequence, started in %.1f s: %s",
        address,
        served_name(config.model, config.served_model_name),
        loaded.dtype,
        loaded.device,
        backend.weight_bytes / 1e9,
        limits.num_blocks,
        limits.block_size,
        backend.kv_cache_bytes / 1e9,
        " of FP8" if loaded.fp8_kv else "",
        limits.host_blocks,
        limits.num_slots,
        limits.max_model_len,
        phases.seconds,
        phases,
    )


def _refuse_to_start(error: Exception) -> NoReturn:
    log.error(
        "cannot start: %s", error, exc_info=error if log.isEnabledFor(logging.DEBUG) else None
    )
    raise SystemExit(1)
