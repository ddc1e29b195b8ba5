"""The request fields that all generating endpoints share, and their form for a scheduler."""

import re
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, create_model

from pagewire.errors import invalid, quoted
from pagewire.gateway.api.strict import Strict as Strict
from pagewire.gateway.api.structured import StructuredFields
from pagewire.gateway.api.unsupported import STREAM_OPTIONS_HINTS
from pagewire.gateway.details.details import Details
from pagewire.limits import (
    INT32_MAX,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_GIVEN_ID_LENGTH,
    MAX_LOGPROBS,
    MAX_NAME_LENGTH,
)
from pagewire.sampling import NUMBERS, SamplingParams, StopConditions, numbers_of
from pagewire.v1 import inference_pb2 as pb

Int32 = Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
GivenId = Annotated[
    str, Field(min_length=1, max_length=MAX_GIVEN_ID_LENGTH, pattern="^[\\x21-\\x7e]*$")
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]

MAX_CACHE_KEY_LENGTH = 1024
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class StreamOptions(Strict):
    """Options of a streamed answer."""

    hints = STREAM_OPTIONS_HINTS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def string_or_array(field: str, tag: str, entries: str) -> Any:
    """The discriminator of a string, tagged `<string>`, or an array, tagged `tag`.

    `field` and `entries` are for the error of any other value.
    """

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return "<string>"
        return tag if isinstance(value, list) else None

    return Discriminator(
        kind,
        custom_error_type=field,
        custom_error_message=f"it must be a string or an array of {entries}",
    )


def one_or_more_inputs(field: str) -> Any:
    """The discriminator of one input or several, each a text or token ids.

    The tags are `<string>`, `<strings>`, `<token ids>` and `<lists of token ids>`. `field` is for
    the error of any other value.
    """

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return "<string>"
        if not isinstance(value, list):
            return None
        if not value or isinstance(value[0], str):
            return "<strings>"
        return "<lists of token ids>" if isinstance(value[0], list) else "<token ids>"

    return Discriminator(
        kind,
        custom_error_type=field,
        custom_error_message="it must be a string, token ids, or an array of either",
    )


Stop = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[str], Field(fail_fast=True), Tag("<strings>")],
    string_or_array("stop", "<strings>", "strings"),
]


# A `top_k` of -1 is off, as 0 is.
_NUMBER_FIELDS: dict[str, Any] = {
    number.name: (Int32 | None if number.integer else float | None, None) for number in NUMBERS
}
_NumberFields = create_model("_NumberFields", __base__=Strict, **_NUMBER_FIELDS)


# mypy cannot see a class that is made from a table.
class GenerationFields(_NumberFields, StructuredFields):  # type: ignore[misc, valid-type]
    """The fields of every generation. null means that a field is absent.

    The prompt and `logprobs` are not among them: their form differs by endpoint.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Int64 | None = None
    # Keyed by token id.
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    min_tokens: Count | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: str | None = None
    request_id: GivenId | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_CACHE_KEY_LENGTH)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    prompt_logprobs: NumLogprobs | None = None

    # The name of `stop` in errors.
    stop_name: ClassVar[str] = "stop"

    @property
    def max_tokens_name(self) -> str:
        """The name of the output's limit in errors."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a chunk that has the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def details(self, prompt_in_choice: bool) -> Details | None:
        """What the answer shows beside the text; None if nothing."""
        options = self.stream_options
        usage = bool(options and options.continuous_usage_stats)
        ids = bool(self.return_token_ids)
        return Details(ids, usage, prompt_in_choice) if ids or usage else None

    def check_stream_options(self) -> None:
        """RequestError for stream options without `stream`."""
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options", "stream_options needs stream: true; set it or remove the options"
            )

    def resolve_truncation(self, max_model_len: int, max_tokens: int | None) -> None:
        """Replaces a `truncate_prompt_tokens` of -1 by the number of tokens that it stands for.

        The gateway does this so that the prompt stays the same on another scheduler.
        """
        if self.truncate_prompt_tokens == -1:
            self.truncate_prompt_tokens = max(1, max_model_len - (max_tokens or 1))
        elif self.truncate_prompt_tokens == 0:
            raise invalid(
                "truncate_prompt_tokens",
                "truncate_prompt_tokens is 0; it must be at least 1, or -1 for all that fit",
            )

    @property
    def keeps_prompt_start(self) -> bool:
        """Whether a cut prompt keeps its start; RequestError as in `keeps_start`."""
        return keeps_start(self.truncation_side, self.truncate_prompt_tokens)

    def input_options(self) -> dict[str, Any]:
        """The fields of a GenerateRequest that say how its input is tokenized."""
        return {
            "add_special_tokens": self.add_special_tokens,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "keep_prompt_start": self.keeps_prompt_start,
        }

    def num_choices(self) -> int:
        """The number of choices for each prompt; RequestError if `n` is out of range."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise invalid("n", f"n is {n}; it must be between 1 and {MAX_CHOICES}")
        return n

    def candidate_fields(
        self,
        request_id: str,
        model: str,
        stop: pb.StopConditions,
        logprobs: int | None,
        beam_search: pb.BeamSearch | None = None,
    ) -> pb.GenerateRequest:
        """The first candidate's own fields: those that differ between candidates, and those that
        the gateway reads.

        The gateway draws a missing seed. So a request that continues on another scheduler has the
        same random numbers there.
        """
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return pb.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling=pb.SamplingParams(seed=seed),
            stop=pb.StopConditions(
                max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None
            ),
            priority=self.priority or 0,
            logprobs=logprobs,
            deadline_ms=self.deadline_ms,
            beam_search=beam_search,
        )

    def common_parameters(self, stop: pb.StopConditions) -> bytes:
        """Sampling parameters without the seed, stop conditions and structured output: checked and
        serialized.

        All candidates of all prompts share them.
        """
        params = {name: value for name, value in numbers_of(self).items() if value is not None}
        if params.get("top_k") == -1:
            params["top_k"] = 0
        params["logit_bias"] = _by_token_id(self.logit_bias or {})
        if self.allowed_token_ids == []:
            raise invalid("allowed_token_ids", "allowed_token_ids is empty; remove it")
        params["allowed_token_ids"] = tuple(self.allowed_token_ids or ())
        params["bad_words"] = tuple(self.bad_words or ())
        SamplingParams(**params)
        request = pb.GenerateRequest(
            sampling=pb.SamplingParams(**params),
            stop=stop,
            structured_output=self.wanted_output(),
        )
        if self.skip_special_tokens is not None:
            request.skip_special_tokens = self.skip_special_tokens
        return request.SerializeToString()

    def check_prompt_logprobs(self) -> None:
        """RequestError for log probabilities of the prompt in a stream, whose format has no field
        for them."""
        if self.stream and self.prompt_logprobs is not None:
            raise invalid(
                "prompt_logprobs",
                "prompt_logprobs come with a whole answer only; set stream to false, or use echo "
                "with logprobs",
            )

    def stop_conditions(
        self, max_tokens: int | None, may_be_empty: bool = False
    ) -> pb.StopConditions:
        """Checked stop conditions. With `max_tokens` None only the model's length is a limit.

        With `may_be_empty`, `max_tokens` may be 0.
        """
        checked = StopConditions(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            may_be_empty=may_be_empty,
            max_tokens_name=self.max_tokens_name,
            stop_name=self.stop_name,
        )
        return pb.StopConditions(
            max_tokens=checked.max_tokens,
            min_tokens=checked.min_tokens,
            stop=checked.stop,
            stop_token_ids=checked.stop_token_ids,
            ignore_eos=checked.ignore_eos,
            include_stop_str_in_output=checked.include_stop_str_in_output,
        )


def keeps_start(side: str | None, kept_tokens: int | None) -> bool:
    """Whether a cut input keeps its start.

    RequestError for a `truncation_side` that is unknown, or has no effect without
    `truncate_prompt_tokens`.
    """
    field = "truncation_side"
    if side not in (None, "left", "right"):
        raise invalid(
            field,
            f"{field} is {quoted(side)}; it must be left or right, the side where the input is cut",
        )
    if side is not None and kept_tokens is None:
        raise invalid(
            field,
            f"{field} is {side}, which needs truncate_prompt_tokens; set it or remove {field}",
        )
    return side == "right"


def _by_token_id(biases: dict[str, float]) -> dict[int, float]:
    """`logit_bias` with integer keys; in JSON keys are always strings."""
    for key in biases:
        if not _TOKEN_ID.fullmatch(key) or int(key) > INT32_MAX:
            raise invalid(
                "logit_bias",
                f'logit_bias has the key {quoted(key)}; give token ids, such as {{"42": -100}}',
            )
    return {int(key): bias for key, bias in biases.items()}
