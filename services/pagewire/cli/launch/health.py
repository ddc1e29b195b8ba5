"""Health checks of services."""

import asyncio

from pagewire.addresses import is_listen_address
from pagewire.rpc.credentials import NO_CREDENTIALS, Credentials

_POLL_SECONDS = 0.05


async def health_problem(
    address: str, seconds: float = 2.0, credentials: Credentials = NO_CREDENTIALS
) -> str | None:
    """The reason why the service at an address is not healthy; None if it is healthy.

    An `http://` or `https://` URL must answer 200; a URL without a path means /healthz. For a
    `host:port` or `unix:PATH`, the check uses the gRPC health protocol.
    """
    if address.startswith(("http://", "https://")):
        return await asyncio.to_thread(_http_problem, address, seconds)
    if not is_listen_address(address.removeprefix("dns:")):
        return "it is neither host:port nor unix:PATH nor an HTTP URL"
    return await _grpc_problem(address, seconds, credentials)


async def until_healthy(address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
    """Returns when the service is healthy. Waits without limit; the caller sets a timeout."""
    while await health_problem(address, credentials=credentials) is not None:  # noqa: ASYNC110 - the state is another process's
        await asyncio.sleep(_POLL_SECONDS)


def _http_problem(url: str, seconds: float) -> str | None:
    import http.client
    import ssl
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError if it is out of range
        connection = http.client.HTTPConnection(parts.netloc, timeout=seconds)
    except (ValueError, http.client.InvalidURL) as error:
        return f"it is not a URL: {error}"
    if parts.scheme == "https":
        # The request has no secret, and certificates often do not name the address used here.
        unverified = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(parts.netloc, timeout=seconds, context=unverified)
    try:
        connection.request("GET", parts.path or "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error!r}"
    finally:
        connection.close()
    return None if status == 200 else f"HTTP status {status}"


async def _grpc_problem(address: str, seconds: float, credentials: Credentials) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pagewire.rpc.transport import open_channel

    async with open_channel(address, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return f"no answer: {error.code().name}: {error.details()}"
    serving = health_pb2.HealthCheckResponse.SERVING
    if answer.status == serving:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
