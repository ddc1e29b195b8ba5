"""Notices when a client closes its connection."""

from starlette.types import Receive


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection; messages before that are dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
