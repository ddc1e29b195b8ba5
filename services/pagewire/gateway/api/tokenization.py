"""/tokenize and /detokenize: a request becomes a call of a scheduler, its result an answer."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, create_model

from pagewire.errors import invalid
from pagewire.gateway.api.chat import ChatRequest, Message
from pagewire.gateway.api.fields import Strict, TokenId
from pagewire.gateway.api.formatting import json_utf8
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.tool_fields import ToolDefinitions
from pagewire.gateway.api.unsupported import TOKENIZATION_HINTS
from pagewire.gateway.models import ServedModel
from pagewire.v1 import inference_pb2 as pb

TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"

Answer = Literal["tokens", "count", "text"]
# How a chat is rendered, as in /v1/chat/completions.
_CHAT_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "documents",
    "chat_template_kwargs",
    "tools",
)
_IDS_A_PIECE = 1 << 14


@dataclass(frozen=True, slots=True)
class TextCall:
    """A call of a scheduler about text. `request` is its serialized message.

    Helper processes can make it and read its response. `ignored` names fields without an
    effect.
    """

    method: Literal["Tokenize", "Detokenize"]
    model: str
    request: bytes
    answer: Answer
    ignored: tuple[str, ...] = ()

    def body(self, response: bytes, max_model_len: int) -> bytes:
        """The JSON of the answer, from the serialized response."""
        if self.answer == "text":
            text = pb.DetokenizeResponse.FromString(response).text
            return json_utf8({"prompt": text}).encode()
        tokens = pb.TokenizeResponse.FromString(response)
        if self.answer == "count":
            return json_utf8({"input_tokens": len(tokens.token_ids)}).encode()
        return _tokens_body(tokens, max_model_len)


class TokenizeRequest(Strict):
    """The body of a request to /tokenize: a prompt, or the messages of a chat."""

    hints = TOKENIZATION_HINTS

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: Annotated[list[dict[str, JsonValue]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    tools: ToolDefinitions | None = None
    return_token_strs: bool | None = None

    def call(self, model: str, served: ServedModel, limits: BodyLimits) -> TextCall:
        """The call; RequestError names a field that is not valid."""
        ignored: tuple[str, ...] = ()
        request = pb.TokenizeRequest(
            model=model,
            return_token_strs=bool(self.return_token_strs),
        )
        if self.add_special_tokens is not None:
            request.add_special_tokens = self.add_special_tokens
        if self.messages is not None:
            if self.prompt is not None:
                raise invalid("prompt", "prompt and messages are both given; remove one")
            chat, ignored = self._chat().rendering(served, limits)
            request.chat.CopyFrom(chat)
        else:
            request.text = self._text()
        return TextCall("Tokenize", model, request.SerializeToString(), "tokens", ignored)

    def _chat(self) -> ChatRequest:
        options = {name: getattr(self, name) for name in _CHAT_OPTIONS}
        return ChatRequest(messages=self.messages or [], **options)

    def _text(self) -> str:
        if self.prompt is None:
            raise invalid("prompt", "prompt is required, or messages")
        for field in _CHAT_OPTIONS:
            if getattr(self, field) not in (None, False):
                raise invalid(field, f"{field} needs messages; remove it or send a chat")
        return self.prompt


class DetokenizeRequest(Strict):
    """The body of a request to /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    def call(self, model: str) -> TextCall:
        """The call; RequestError names a field that is not valid. Special tokens keep their text,
        so that a prompt's tokens become the prompt again."""
        request = pb.DetokenizeRequest(
            model=model, token_ids=self.tokens, skip_special_tokens=False
        )
        return TextCall("Detokenize", model, request.SerializeToString(), "text")


def tokenize_request_model(max_messages: int) -> type[TokenizeRequest]:
    """TokenizeRequest with a bound on messages, which is checked while they are being parsed."""
    messages = Annotated[list[Message], Field(fail_fast=True, max_length=max_messages)] | None
    return create_model("TokenizeRequest", __base__=TokenizeRequest, messages=(messages, None))


def _tokens_body(response: pb.TokenizeResponse, max_model_len: int) -> bytes:
    ids = response.token_ids
    # A list of millions of Python integers would need many times the memory of its text.
    pieces = (
        ",".join(map(str, ids[begin : begin + _IDS_A_PIECE]))
        for begin in range(0, len(ids), _IDS_A_PIECE)
    )
    strs: Any = list(response.token_strs) or None
    return (
        f'{{"count":{len(ids)},"max_model_len":{max_model_len},"tokens":[{",".join(pieces)}],'
        f'"token_strs":{json_utf8(strs)}}}'
    ).encode()
