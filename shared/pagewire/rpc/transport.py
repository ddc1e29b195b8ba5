"""gRPC servers and channels with the options that every service uses, and health checks."""

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagewire.addresses import is_listen_address
from pagewire.rpc.checksums import ChecksumInterceptor
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.interceptors import DecodeInterceptor, TokenInterceptor
from pagewire.rpc.protocol import MAX_MESSAGE_BYTES

# Pings detect a peer that vanished without closing its connection: a lost machine, a cut cable or a
# stopped process. gRPC answers them on threads of its own, so a busy interpreter does not delay
# them.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # by default a minute, in spite of the timeout above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [
    *_KEEPALIVE,
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # With this option two servers could share a port; a port in use must be an error.
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    *_LIMITS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

_CALLS_END_SECONDS = 0.2
_MAX_SOCKET_PATH = 107  # bytes; Linux's bound


def open_channel(address: str, credentials: Credentials = NO_CREDENTIALS) -> grpc.aio.Channel:
    """A channel to `host:port`, encrypted if the credentials have an authority, or to `unix:PATH`.

    The channel does not add the token to calls: pass `credentials.metadata` to each call.
    """
    if credentials.authority is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = credentials.server_name
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(
            credentials.authority, credentials.key, credentials.certificate
        ),
        options=[*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])],
    )


def end_call(call: grpc.aio.Call) -> None:
    """Cancels a call, even one that gRPC counts as ended because a write on it failed.

    For such a call `cancel` does nothing: the call, its connection and the task that waits for its
    status would never end (grpc/grpc#41875).
    """
    if not call.cancel():
        call._cython_call.cancel("the call is over")  # type: ignore[attr-defined]


def was_cancelled() -> bool:
    """Whether the current task has been cancelled.

    gRPC also raises CancelledError when the other side cancels a call. If the task is cancelled,
    gRPC may raise an error of the call instead.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def make_server(
    credentials: Credentials = NO_CREDENTIALS,
    access: grpc.aio.ServerInterceptor | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server without services and addresses, which accepts messages of `max_message_bytes`.

    The interceptor `access` decides which callers are accepted. By default callers need the token,
    if there is one, except for health checks. `interceptors` run after all others.
    """
    chain: list[grpc.aio.ServerInterceptor] = [
        DecodeInterceptor(),
        ChecksumInterceptor(),
        *interceptors,
    ]
    if access is not None:
        chain.insert(0, access)
    elif credentials.token is not None:
        chain.insert(0, TokenInterceptor(credentials))
    # gRPC uses the first of two options with the same name.
    options = [("grpc.max_receive_message_length", max_message_bytes), *SERVER_OPTIONS]
    server: grpc.aio.Server = grpc.aio.server(interceptors=chain, options=options)
    return server


async def stop_server(server: grpc.aio.Server, grace: float | None = None) -> None:
    """Stops a server just before its process ends; its calls have `grace` seconds to end.

    `stop` returns before the tasks of cancelled calls have ended. gRPC logs a traceback for each
    task that ends with the event loop.
    """
    await server.stop(grace)
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=_CALLS_END_SECONDS)


class _Watchers(defaultdict[str, asyncio.Condition]):
    """The condition of each service, on which the watchers of its health wait.

    gRPC's servicer removes a service's condition when one of its watchers leaves, and the others
    would receive no further changes. The conditions of `kept` services stay.
    """

    def __init__(self, kept: Sequence[str]) -> None:
        super().__init__(asyncio.Condition)
        self._kept = kept

    def __delitem__(self, service: str) -> None:
        if service not in self._kept:
            super().__delitem__(service)


class Health:
    """The health of one server in grpc.health.v1, NOT_SERVING at first.

    The empty service name and the service's own name have the same state.
    """

    def __init__(self, service_name: str) -> None:
        self._names = ("", service_name)
        self._servicer = health.aio.HealthServicer()
        self._servicer._server_watchers = _Watchers(self._names)
        self.serving = False

    def attach(self, server: grpc.aio.Server) -> None:
        """Adds health checking and reflection for this service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection(
            (self._names[1], health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )

    async def set_serving(self, serving: bool) -> None:
        """Sets the answer of health checks: SERVING or NOT_SERVING."""
        self.serving = serving
        state = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in self._names:
            await self._servicer.set(name, state)


def bind(
    server: grpc.aio.Server, addresses: Sequence[str], credentials: Credentials = NO_CREDENTIALS
) -> list[int]:
    """Listens on each address and returns the ports; RuntimeError names an address that is in use
    or not valid.

    With a certificate, TCP is encrypted. The port of a `unix:PATH` is 1.
    """
    ports = []
    for address in addresses:
        # gRPC would take the port modulo 2^16, and 443 without a port.
        if not is_listen_address(address):
            raise RuntimeError(f"cannot listen on {address}: it is neither host:port nor unix:PATH")
        if address.startswith("unix:"):
            _check_socket(address)
        try:
            ports.append(_add_port(server, address, credentials))
        except RuntimeError as error:
            raise RuntimeError(
                f"cannot listen on {address}: the address is in use, or not one of this machine"
            ) from error
    return ports


def _check_socket(address: str) -> None:
    """RuntimeError if a server cannot listen on `unix:PATH`.

    gRPC removes the socket of a process that still listens, and its own error does not give the
    reason. A socket that a killed process has left behind is no obstacle.
    """
    path = Path(address.removeprefix("unix:").replace("//", "/", 1))
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise RuntimeError(
            f"cannot listen on {address}: the path has more than {_MAX_SOCKET_PATH} bytes; give a "
            "shorter one"
        )
    if not path.parent.is_dir():
        raise RuntimeError(f"cannot listen on {address}: there is no folder {path.parent}; make it")
    if path.exists() and not path.is_socket():
        raise RuntimeError(
            f"cannot listen on {address}: {path} exists and is not a socket; remove it, or give "
            "another path"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass  # the backlog of a process that listens is full
        except OSError:
            return
    raise RuntimeError(
        f"cannot listen on {address}: another process listens there; end it, or give another path"
    )


def _add_port(server: grpc.aio.Server, address: str, credentials: Credentials) -> int:
    if credentials.certificate is None or address.startswith("unix:"):
        return int(server.add_insecure_port(address))
    verify = credentials.authority is not None and credentials.verify_clients
    tls = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)],
        root_certificates=credentials.authority if verify else None,
        require_client_auth=verify,
    )
    return int(server.add_secure_port(address, tls))
