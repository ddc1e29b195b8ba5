"""gRPC servers and channels as every service sets them up: limits, keep-alive, health, reflection.

Health follows grpc.health.v1: the empty service name and the service's own name share one state.
"""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagewire.rpc.checksums import SealGate
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials
from pagewire.rpc.interceptors import DecodeInterceptor, TokenInterceptor
from pagewire.rpc.protocol import MAX_MESSAGE_BYTES

# Pings find a peer that vanished without closing its connection: a lost machine, a cut cable, a
# process that was stopped. gRPC answers them itself, so a busy interpreter is no reason to be late.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # without it gRPC waits a minute, whatever is above
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
    # Two servers on one port would take turns at answering; a port in use must be an error.
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    *_LIMITS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def open_channel(address: str, credentials: Credentials = NO_CREDENTIALS) -> grpc.aio.Channel:
    """A channel to `host:port`, encrypted where there is an authority, or to `unix:PATH`.

    Calls carry no token of themselves: pass `credentials.metadata` to them.
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
    """Cancels a call, one included that gRPC takes to have ended because a write on it failed.

    Its `cancel` does nothing then, and the call, a task that waits for its status and its
    connection would stay for good (grpc/grpc#41875).
    """
    if not call.cancel():
        call._cython_call.cancel("the call is over")


def make_server(
    credentials: Credentials = NO_CREDENTIALS,
    gate: grpc.aio.ServerInterceptor | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    largest_message: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server without services and addresses; with a token it asks for it, but for health.

    A `gate` of its own decides in place of that who may call. `interceptors` are asked last;
    `largest_message` are the most bytes that a client may send.
    """
    gates: list[grpc.aio.ServerInterceptor] = [DecodeInterceptor(), SealGate(), *interceptors]
    if gate is not None:
        gates.insert(0, gate)
    elif credentials.token is not None:
        gates.insert(0, TokenInterceptor(credentials))
    # Of an option that is there twice gRPC takes the first.
    options = [("grpc.max_receive_message_length", largest_message), *SERVER_OPTIONS]
    return grpc.aio.server(interceptors=gates, options=options)


class Health:
    """The health of one server, NOT_SERVING until said otherwise."""

    def __init__(self, service_name: str) -> None:
        self._names = ("", service_name)
        self._servicer = health.aio.HealthServicer()
        self.serving = False

    def attach(self, server: grpc.aio.Server) -> None:
        """Adds health checking and reflection for this service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection(
            (self._names[1], health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )

    async def set_serving(self, serving: bool) -> None:
        """Answers SERVING or NOT_SERVING from now on."""
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
    """Listens on each address; the ports chosen. RuntimeError names one that is in use or wrong.

    With a certificate TCP is encrypted. A socket file has no port; gRPC answers 1 for it.
    """
    ports = []
    for address in addresses:
        if not _is_address(address):  # gRPC would take a port modulo 2^16, and 443 for none
            raise RuntimeError(f"cannot listen on {address}: it is no host:port or unix:PATH")
        try:
            ports.append(_add_port(server, address, credentials))
        except RuntimeError as error:
            raise RuntimeError(
                f"cannot listen on {address}: it is in use or not an address of this machine"
            ) from error
    return ports


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return address.startswith("unix:") or (
        bool(host) and port.isascii() and port.isdigit() and int(port) < 65536
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
