"""Who makes jobs of bodies: the event loop of small ones, helper processes of the others."""

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
    most_nodes,
    pack_task,
    unpack_job,
)
from pagewire.gateway.errors import ClientGoneError
from pagewire.helpers.pool import HelperError, HelperPool

# Bodies within both bounds are parsed by the event loop, in some milliseconds at worst.
INLINE_BYTES = 16 << 10
INLINE_NODES = 512
# Larger ones are not given to the last helper that is free.
LARGE_BYTES = 1 << 20


class Parser:
    """Parses bodies in time that holds no event loop up."""

    def __init__(
        self,
        limits: BodyLimits,
        max_body_bytes: int,
        processes: int = GatewayConfig.parser_processes,
        timeout: float = GatewayConfig.parse_timeout,
    ) -> None:
        self._inline = JobParser(limits)
        self._helpers = HelperPool(
            "the gateway's parser",
            "pagewire.gateway.api.parsing:load_helper",
            HelperSetup(limits, max_body_bytes),
            size=processes,
            timeout=timeout,
        )

    async def start(self) -> None:
        """Starts the first helper, without waiting for it."""
        await self._helpers.start()

    async def close(self) -> None:
        """Ends the helpers."""
        await self._helpers.close()

    async def job(
        self, route: Route, body: bytes, models: Mapping[str, int], receive: Receive
    ) -> Job:
        """The work that a body asks for; RequestError names the field at fault.

        ClientGoneError as soon as the client hangs up. `models` are those served, with their
        lengths.
        """
        if len(body) <= INLINE_BYTES and most_nodes(body) <= INLINE_NODES:
            return self._inline.job(route, body, models)
        task = pack_task(route, body, models)
        parsing = asyncio.create_task(self._helpers.run(task, large=len(body) > LARGE_BYTES))
        hanging_up = asyncio.create_task(_hung_up(receive))
        try:
            await asyncio.wait({parsing, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if not parsing.done():
                hanging_up.result()
                raise ClientGoneError
            return unpack_job(parsing.result())
        except HelperError as error:
            raise RequestError(
                Code.INTERNAL, f"the request could not be parsed: {error}; make it smaller"
            ) from error
        finally:
            for task_ in (parsing, hanging_up):
                task_.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hanging_up  # or it would take what the next reader waits for


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
