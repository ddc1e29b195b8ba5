"""Requests about text that generate nothing: from a body, over a scheduler, to an answer."""

from starlette.requests import Request
from starlette.responses import Response

from pagewire.gateway.api.parsing import TextRoute
from pagewire.gateway.http.disconnect import while_connected
from pagewire.gateway.http.paced_json import PacedJson
from pagewire.gateway.http.parser_pool import ParserPool
from pagewire.gateway.routing.schedulers import Schedulers


async def answer_text_call(
    request: Request, route: TextRoute, body: bytes, parser: ParserPool, schedulers: Schedulers
) -> Response:
    """The answer to a request; RequestError or ClientGoneError if there is none."""
    receive = request.receive
    call = await parser.text_call(route, body, schedulers.models(), receive)
    response = await while_connected(
        schedulers.call(call.method, call.model, call.request), receive
    )
    max_model_len = schedulers.model(call.model).max_model_len
    return PacedJson([await parser.text_body(call, response, max_model_len, receive)])
