"""Notices when a client closes its connection."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from pagewire.gateway.errors import ClientGoneError

Result = TypeVar("Result")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection; messages before that are dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of `work`; cancels it and raises ClientGoneError when the client leaves."""
    working = asyncio.create_task(work)
    disconnect = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            disconnect.result()
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        disconnect.cancel()
        # Until this task has ended, it would consume the messages of the next reader.
        with contextlib.suppress(asyncio.CancelledError):
            await disconnect
