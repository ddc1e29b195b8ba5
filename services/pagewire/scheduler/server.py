"""The scheduler's process: start, readiness, drain, end."""

import asyncio
import logging
import signal
import socket
import sys

from pagewire.addresses import listen_address, parse_worker_addresses
from pagewire.config import SchedulerConfig
from pagewire.errors import RequestError
from pagewire.lifecycle import logs
from pagewire.lifecycle.loop_lag import measure_loop_lag
from pagewire.lifecycle.metrics import count_tasks, serve_metrics
from pagewire.lifecycle.process import essential, run_service
from pagewire.models import served_name
from pagewire.rpc.credentials import SCHEDULER_TOKEN, WORKER_TOKEN, Credentials, read_token
from pagewire.rpc.transport import Health, bind, stop_server
from pagewire.scheduler.auth import (
    SERVICE_NAME,
    public_credentials,
    public_server,
    read_callers,
)
from pagewire.scheduler.engine import Engine
from pagewire.scheduler.reports.throughput import log_throughput
from pagewire.scheduler.reports.vllm_names import publish_vllm_names
from pagewire.scheduler.requests.text_helper import read_tokenizer
from pagewire.scheduler.service import InferenceService
from pagewire.scheduler.workers.membership import Workers
from pagewire.scheduler.workers.shared_workers import SharedWorkers
from pagewire.tracing.start import start_tracing
from pagewire.v1 import inference_pb2_grpc

log = logging.getLogger(__name__)


def run_scheduler(config: SchedulerConfig) -> None:
    """Serves until SIGTERM or SIGINT; exits with status 1 and one line when it cannot start."""
    logs.configure("scheduler", config.log_level, config.log_format)
    try:
        run_service(lambda stop: _serve(config, stop))
    except (OSError, RuntimeError, ValueError, RequestError) as error:
        log.debug("the scheduler cannot start", exc_info=True)
        sys.exit(f"pagewire scheduler: {error}")


async def _serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
    addresses = parse_worker_addresses(config.workers)
    tokenizer = await asyncio.to_thread(read_tokenizer, config)
    health = Health(SERVICE_NAME)
    changed = asyncio.Event()
    engine = Engine(
        config, served_name(config.model, config.served_model_name), tokenizer, changed.set
    )
    publish_vllm_names(engine.model, engine.counts)
    tracing = engine.intake.tracing = start_tracing(config, "scheduler")
    address = listen_address(config.grpc_host, config.grpc_port)
    callers = read_callers(config)
    public = public_credentials(config, address, callers.have_keys)
    to_workers = Credentials.of(config).with_token(
        read_token(config.worker_token_file, WORKER_TOKEN)
    )
    server = public_server(config, public, callers)
    if callers.have_keys:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, callers.reload)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(engine), server)
    health.attach(server)
    await health.set_serving(False)
    [port] = bind(server, [address], public)
    count_tasks()
    measure_loop_lag()
    serve_metrics(config.metrics_host, config.scheduler_metrics_port)
    await server.start()
    await engine.intake.helpers.start()
    log.info("listening on %s", listen_address(config.grpc_host, port))
    if callers.have_keys:
        log.info("%d API keys", callers.num_keys)
        if not public.authenticates_clients:
            log.warning(
                "no token: any process on this machine may call as a gateway; set %s",
                SCHEDULER_TOKEN,
            )
    workers = Workers(
        addresses,
        engine,
        config.drain_timeout,
        credentials=to_workers,
        step_timeout=config.step_timeout,
        shared=_shared_workers(config, engine),
    )
    tasks = [
        essential(asyncio.create_task(workers.run())),
        essential(asyncio.create_task(_follow_readiness(engine, health, changed))),
        essential(asyncio.create_task(log_throughput(engine.counts))),
    ]
    await stop.wait()
    log.info(
        "draining for at most %g s, %d requests are open; a second signal ends them at once",
        config.drain_timeout,
        engine.num_open,
    )
    engine.intake.draining = True
    workers.stop_sharing()
    changed.set()
    await _drain(engine, config.drain_timeout)
    for task in tasks:
        task.cancel()
    await stop_server(server, 0.5)
    await engine.intake.helpers.close()
    await engine.intake.grammars.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


def _shared_workers(config: SchedulerConfig, engine: Engine) -> SharedWorkers | None:
    if not config.share_workers:
        return None
    name = f"{socket.gethostname()}:{config.grpc_port}/{engine.instance_id[:8]}"
    log.info("workers are shared; this scheduler is %s", name)
    return SharedWorkers(
        name, engine.model, config.rebalance_after, config.drain_timeout, engine.num_running
    )


async def _follow_readiness(engine: Engine, health: Health, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        serving = engine.ready and not engine.intake.draining
        if serving != health.serving:
            log.info("ready" if serving else "not ready")
        await health.set_serving(serving)


async def _drain(engine: Engine, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await engine.endings.open.all_closed.wait()
    except TimeoutError:
        log.warning("%d requests did not finish within %g s", engine.num_open, seconds)
