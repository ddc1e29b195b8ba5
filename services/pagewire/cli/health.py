"""Asks a service whether it is healthy."""

import asyncio

_POLL_SECONDS = 0.05


async def problem_of(address: str, seconds: float = 2.0) -> str | None:
    """Why the service at an address is not healthy, None if it is.

    `http://...` is fetched (with /healthz where the URL has no path) and must answer 200;
    `host:port` and `unix:PATH` are asked by the gRPC health protocol.
    """
    if address.startswith(("http://", "https://")):
        return await asyncio.to_thread(_http_problem, address, seconds)
    return await _grpc_problem(address, seconds)


async def until_healthy(address: str) -> None:
    """Returns when the service is healthy. Waits without limit: the caller knows a better one."""
    while await problem_of(address) is not None:  # noqa: ASYNC110 - it is another process's state
        await asyncio.sleep(_POLL_SECONDS)


def _http_problem(url: str, seconds: float) -> str | None:
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=seconds)
    try:
        connection.request("GET", parts.path or "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error!r}"
    finally:
        connection.close()
    return None if status == 200 else f"HTTP status {status}"


async def _grpc_problem(address: str, seconds: float) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pagewire.rpc import open_channel

    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return f"no answer: {error.code().name}: {error.details()}"
    serving = health_pb2.HealthCheckResponse.SERVING
    if answer.status == serving:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
