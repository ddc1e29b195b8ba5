"""Where bodies are parsed: small ones on the event loop, others in helper processes."""

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Receive

from pagewire.config import GatewayConfig
from pagewire.errors import Code, RequestError
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.parsing import (
    HelperSetup,
    JobParser,
    Route,
    node_bound,
    pack_task,
    unpack_job,
)
from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.http.disconnect import wait_for_disconnect
from pagewire.gateway.models import ServedModel
from pagewire.helpers.pool import HelperError, HelperPool

# The event loop parses bodies within both bounds. That takes a few milliseconds at worst.
INLINE_BYTES = 16 << 10
INLINE_NODES = 512
# Larger bodies do not get the last free helper process.
LARGE_BYTES = 1 << 20


class ParserPool:
    """Parses bodies without blocking the event loop."""

    def __init__(
        self,
        limits: BodyLimits,
        max_body_bytes: int,
        processes: int = GatewayConfig.parser_processes,
        timeout: float = GatewayConfig.parse_timeout,
        strict_fields: bool = False,
    ) -> None:
        self._inline = JobParser(limits, strict_fields)
        self._helpers = HelperPool(
            "the gateway's parser",
            "pagewire.gateway.api.parsing:load_helper",
            HelperSetup(limits, max_body_bytes, strict_fields),
            size=processes,
            timeout=timeout,
        )

    async def start(self) -> None:
        """Starts the first helper process, without waiting for it."""
        await self._helpers.start()

    async def close(self) -> None:
        """Ends the helper processes."""
        await self._helpers.close()

    async def parse(
        self, route: Route, body: bytes, models: Mapping[str, ServedModel], receive: Receive
    ) -> Job:
        """The job of a body; RequestError names a field that is not valid.

        `models` has the served models. ClientGoneError as soon as the
        client closes its connection.
        """
        if len(body) <= INLINE_BYTES and node_bound(body) <= INLINE_NODES:
            return self._inline.parse(route, body, models)
        task = pack_task(route, body, models)
        parsing = asyncio.create_task(self._helpers.run(task, large=len(body) > LARGE_BYTES))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({parsing, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not parsing.done():
                disconnect.result()
                raise ClientGoneError
            return unpack_job(parsing.result())
        except HelperError as error:
            raise RequestError(
                Code.INTERNAL, f"the request could not be parsed: {error}; make it smaller"
            ) from error
        finally:
            parsing.cancel()
            disconnect.cancel()
            # Until it has ended it would take the messages of the next reader.
            with contextlib.suppress(asyncio.CancelledError):
                await disconnect
