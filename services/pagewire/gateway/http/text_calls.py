"""Calls about text that generate nothing: a scheduler's result becomes an answer."""

from starlette.responses import Response
from starlette.types import Receive

from pagewire.gateway.answers.disconnect import while_connected
from pagewire.gateway.answers.paced_json import PacedJson
from pagewire.gateway.api.tokenization import TextCall
from pagewire.gateway.parsing.parser_pool import ParserPool
from pagewire.gateway.routing.schedulers import Schedulers


async def answer_text_call(
    call: TextCall, parser: ParserPool, schedulers: Schedulers, receive: Receive
) -> Response:
    """The answer to a call; RequestError or ClientGoneError if there is none."""
    response = await while_connected(
        schedulers.call(call.method, call.model, call.request), receive
    )
    max_model_len = schedulers.model(call.model).max_model_len
    return PacedJson([await parser.text_body(call, response, max_model_len, receive)])
