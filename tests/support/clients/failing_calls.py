"""Coroutines that fail as gRPC calls do."""

import asyncio

import grpc


async def fails_when_cancelled(_: object) -> None:
    """Waits until it is cancelled, then raises the error of a broken call."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing) from None
