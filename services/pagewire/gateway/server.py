"""The gateway's process: it listens, serves and drains."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from pagewire.addresses import is_fault_of_port, is_loopback, parse_addresses, with_port
from pagewire.auth.keys import KEYS_VARIABLE, read_keys
from pagewire.config import GatewayConfig
from pagewire.errors import Code, RequestError
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.auth.access import AccessControl
from pagewire.gateway.http.app import Gateway, create_app
from pagewire.gateway.http.protocol import HttpProtocol
from pagewire.gateway.metric_aliases import publish_aliases
from pagewire.gateway.metrics import GatewayMetrics, LoadCollector
from pagewire.gateway.routing.schedulers import Schedulers
from pagewire.lifecycle.logs import configure
from pagewire.lifecycle.loop_lag import measure_loop_lag
from pagewire.lifecycle.metrics import count_tasks, serve_metrics
from pagewire.lifecycle.process import run_service
from pagewire.rpc.certificates import check_pair
from pagewire.rpc.credentials import SCHEDULER_TOKEN, Credentials, read_token
from pagewire.tracing.start import start_tracing

if TYPE_CHECKING:
    from pagewire.tracing.otel import Tracing

log = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75  # longer than proxies keep idle connections
_FIRST_CONTACT_SECONDS = 2.0
_CLOSE_SECONDS = 5  # for connections to close after their requests have ended
_MAX_OPEN_REQUESTS = 8192
_FEW_OPEN_REQUESTS = 512
_OTHER_DESCRIPTORS = 128  # logs, schedulers, metrics, refused connections


def run_gateway(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Exits with status 1 if it cannot start."""
    configure("gateway", config.log_level, config.log_format)
    try:
        addresses = parse_addresses(config.schedulers)
        # Keys are not a setting: every user of the machine can see the flags of a process.
        access = AccessControl(
            partial(read_keys, config.api_keys_file, os.environ.get(KEYS_VARIABLE, ""))
        )
        credentials = Credentials.of(config).with_token(
            read_token(config.scheduler_token_file, SCHEDULER_TOKEN)
        )
        check_pair("https", config.https_cert, config.https_key)
        tracing = start_tracing(config, "gateway")
        listener = _listen(config.host, config.port)
        metrics = GatewayMetrics()
        serve_metrics(config.metrics_host, config.gateway_metrics_port, metrics.registry)
    except (OSError, ValueError) as error:
        sys.exit(f"pagewire gateway: {error}")
    with listener:
        schedulers = Schedulers(
            addresses,
            metrics,
            resume_seconds=config.resume_timeout,
            credentials=credentials,
            max_resumes=config.max_resumes,
            expected_models=_split(config.expected_models),
        )
        run_service(partial(_serve, config, schedulers, metrics, access, listener, tracing))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, but with an event for its start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.started_listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: `run_service` handles signals, as the gateway drains first."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening, and sets the event."""
        await super().startup(sockets)
        self.started_listening.set()


async def _serve(
    config: GatewayConfig,
    schedulers: Schedulers,
    metrics: GatewayMetrics,
    access: AccessControl,
    listener: socket.socket,
    tracing: "Tracing | None",
    stop: asyncio.Event,
) -> None:
    gateway = Gateway(
        schedulers,
        metrics,
        config.max_body_bytes,
        max_open_requests(config),
        access=access,
        cors_origins=_split(config.cors_origins),
        describe=config.openapi,
        shows_metrics=config.api_metrics,
        max_open_body_bytes=config.max_open_body_bytes,
        limits=BodyLimits.of(config),
        parser_processes=config.parser_processes,
        parse_timeout=config.parse_timeout,
        strict_fields=config.strict_fields,
        tracing=tracing,
        page=config.page,
        playground_socket=config.playground_socket,
    )
    metrics.registry.register(
        LoadCollector(
            lambda: [(link.target, link.load, link.ready) for link in [*schedulers.links.values()]]
        )
    )
    publish_aliases(metrics, lambda: [link.load for link in [*schedulers.links.values()]])
    count_tasks(metrics.registry)
    measure_loop_lag(metrics.registry)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, access.reload)
    await schedulers.start()
    # Connections wait in the listener's backlog meanwhile. So a restarted gateway does not refuse
    # requests because it has not reached its schedulers yet.
    await schedulers.wait_until_ready(_FIRST_CONTACT_SECONDS)
    server = _Server(_uvicorn_config(gateway, config))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.started_listening.wait()
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.https_cert else "http"
    log.info("ready on %s://%s", scheme, with_port(host, port))
    _log_access(access, host)
    await gateway.parser.start()
    await stop.wait()
    await _drain(gateway, config.drain_timeout)
    server.should_exit = True
    await serving
    await gateway.parser.close()
    await schedulers.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


def max_open_requests(config: GatewayConfig) -> int:
    """How many requests may be open at once. Raises the file descriptor limit to its maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if config.max_open_requests is not None:
        return config.max_open_requests
    if hard == resource.RLIM_INFINITY:
        return _MAX_OPEN_REQUESTS
    allowed = max(1, min(_MAX_OPEN_REQUESTS, hard - _OTHER_DESCRIPTORS))
    if allowed < _FEW_OPEN_REQUESTS:
        log.warning(
            "the limit of %d file descriptors allows only %d open requests; raise it (ulimit -n), "
            "or set --max-open-requests",
            hard,
            allowed,
        )
    return allowed


def _split(listed: str) -> tuple[str, ...]:
    """The values of a setting, separated by commas."""
    return tuple(value.strip() for value in listed.split(",") if value.strip())


def _log_access(access: AccessControl, host: str) -> None:
    if access.num_keys:
        log.info("%d API keys", access.num_keys)
    elif not is_loopback(host):
        log.warning(
            "no API keys: anyone who can reach %s may send requests; set --api-keys-file", host
        )


async def _drain(gateway: Gateway, seconds: float) -> None:
    """Refuses new requests while the open ones finish; ends the rest with an error in time."""
    gateway.status.draining = True
    log.info(
        "draining for at most %g s, %d requests are open; a second signal ends them at once",
        seconds,
        gateway.traffic.num_generating,
    )
    await gateway.engine.viewers.close()
    if not await gateway.traffic.wait_until_idle(seconds):
        log.warning("requests are still open after %g s; they end with an error", seconds)
        gateway.schedulers.fail_all(RequestError(Code.UNAVAILABLE, "the gateway is shutting down"))


def _uvicorn_config(gateway: Gateway, config: GatewayConfig) -> uvicorn.Config:
    debug = config.log_level == "debug"
    return uvicorn.Config(
        create_app(gateway),
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="info" if debug else "warning",
        access_log=False,  # request_log.py writes a line for each request
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        ssl_certfile=config.https_cert,
        ssl_keyfile=config.https_key,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        flag = "--port" if is_fault_of_port(error) else "--host"
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {flag}"
        ) from error
