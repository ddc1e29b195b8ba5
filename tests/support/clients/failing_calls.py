"""Calls that fail as gRPC's do."""

import asyncio

import grpc


async def fails_when_cancelled(_: object) -> None:
    """Lasts until it is cancelled, and answers that by an error of its call."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing) from None
