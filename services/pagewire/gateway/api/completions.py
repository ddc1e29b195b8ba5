"""/v1/completions: the fields of a request, and the form of its answer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, Tag

from pagewire.config import GatewayConfig
from pagewire.context_length import context_length_exceeded
from pagewire.errors import invalid
from pagewire.gateway.api.fields import (
    GenerationFields,
    Int32,
    NumLogprobs,
    Tokens,
    one_or_more_inputs,
)
from pagewire.gateway.api.formatting import Envelope, ended_by, json_logprob
from pagewire.gateway.api.job import Job, ask_for_prompt, candidates
from pagewire.gateway.api.unsupported import COMPLETION, COMPLETION_HINTS
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.gateway.generation.logprob_log import Candidate, TokenLogprobs
from pagewire.gateway.generation.prompt_log import PromptWishes
from pagewire.limits import MAX_CHOICES
from pagewire.v1 import inference_pb2 as pb

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
MAX_OUTPUTS = 1024  # all candidates of all prompts of a request

Prompt = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_OUTPUTS), Tag("<strings>")]
    | Annotated[Tokens, Tag("<token ids>")]
    | Annotated[
        list[Tokens], Field(fail_fast=True, max_length=MAX_OUTPUTS), Tag("<lists of token ids>")
    ],
    one_or_more_inputs("prompt"),
]


class CompletionRequest(GenerationFields):
    """The body of a request; `GenerationFields` has the fields shared with other endpoints."""

    hints = COMPLETION_HINTS
    refused = COMPLETION

    prompt: Prompt
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Int32 | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None

    def job(
        self,
        model: str,
        max_model_len: int,
        max_prompt_logprobs: int = GatewayConfig.max_prompt_logprobs,
    ) -> Job:
        """The requests for the schedulers; RequestError names a field that is not valid."""
        self.check_stream_options()
        envelope = Envelope("cmpl", "text_completion", model)
        max_tokens = self.given_max_tokens()
        self.check_prompt_logprobs()
        wants_prompt = bool(self.echo or self.return_token_ids) or self.prompt_logprobs is not None
        stop = self.stop_conditions(max_tokens, wants_prompt)
        n, count = self.num_choices(), self._num_candidates()
        beam_search = self._beam_search(n, count)
        # Log probabilities decide which candidates are best.
        logprobs = 0 if count > n and not beam_search and self.logprobs is None else self.logprobs
        prompts = self._prompts()
        if len(prompts) * count > MAX_OUTPUTS:
            raise invalid(
                "n" if self.best_of is None else "best_of",
                f"{count} outputs of each of {len(prompts)} prompts are {len(prompts) * count}; at "
                f"most {MAX_OUTPUTS} are allowed",
            )
        requests_each = 1 if beam_search else count
        parameters, salt = self.common_parameters(stop), self.cache_salt or ""
        common = [
            CommonFields.of(
                parameters,
                pb.GenerateRequest(
                    model=model,
                    cache_salt=salt,
                    **self.input_options(),
                    **_input(self._kept(prompt), index, max_model_len, max_tokens),
                ),
                self.prompt_cache_key,
            )
            for index, prompt in enumerate(prompts)
        ]
        requests = [
            self.candidate_fields(f"{envelope.id}-{index}", model, stop, logprobs, beam_search)
            for index in range(len(prompts))
        ]
        wishes = tuple(map(self._prompt_wishes, prompts)) if wants_prompt else ()
        for request, wished in zip(requests, wishes, strict=False):
            ask_for_prompt(request, wished)
        return Job(
            requests=candidates(requests, requests_each),
            common=common,
            candidates=requests_each,
            n=n,
            formatter=CompletionFormatter(
                envelope,
                bool(self.return_tokens_as_token_ids),
                frozenset(self.stop_token_ids or ()),
            ),
            stream=bool(self.stream),
            include_usage=self.include_usage,
            shows_logprobs=self.logprobs is not None,
            request_id=self.request_id,
            details=self.details(prompt_in_choice=True),
            prompts=wishes,
            max_prompt_logprobs=max_prompt_logprobs,
        )

    def _prompt_wishes(self, prompt: str | list[int]) -> PromptWishes:
        """What the answer contains of a prompt. The scheduler sends the text of token ids, and of
        a prompt that is cut."""
        whole = self.echo and self.truncate_prompt_tokens is None
        return PromptWishes(
            echo=bool(self.echo),
            text=prompt if whole and isinstance(prompt, str) else None,
            echoed_top=self.logprobs if self.echo else None,
            top=self.prompt_logprobs,
            ids=bool(self.return_token_ids),
        )

    def given_max_tokens(self) -> int:
        """The limit of the output."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def _kept(self, prompt: str | list[int]) -> str | list[int]:
        """The prompt, without the token ids that are cut off."""
        kept = self.truncate_prompt_tokens
        if kept is None or isinstance(prompt, str):
            return prompt
        return prompt[:kept] if self.keeps_prompt_start else prompt[-kept:]

    def _beam_search(self, n: int, width: int) -> pb.BeamSearch | None:
        """The beam search, if one is requested. The scheduler checks it against the model."""
        if not self.use_beam_search:
            for field, given in (
                ("length_penalty", self.length_penalty not in (None, 1.0)),
                ("early_stopping", bool(self.early_stopping)),
            ):
                if given:
                    raise invalid(field, f"{field} needs use_beam_search: true; remove it")
            return None
        for field, wanted in (
            ("echo", bool(self.echo)),
            ("prompt_logprobs", self.prompt_logprobs is not None),
        ):
            if wanted:
                raise invalid(field, f"{field} cannot be used with beam search; remove it")
        if self.stream:
            raise invalid(
                "stream", "the outputs of a beam search are known at its end only; leave stream out"
            )
        return pb.BeamSearch(
            width=width,
            num_returned=n,
            length_penalty=self.length_penalty,
            early_stopping=bool(self.early_stopping),
        )

    def _num_candidates(self) -> int:
        """How many candidates each prompt has; the best n of them become choices."""
        n = self.num_choices()
        if self.best_of is None:
            return n
        if not n <= self.best_of <= MAX_CHOICES:
            raise invalid(
                "best_of",
                f"best_of is {self.best_of}; it must be between n, which is {n}, and {MAX_CHOICES}",
            )
        if self.stream and self.best_of > n and not self.use_beam_search:
            raise invalid(
                "best_of",
                f"best_of is {self.best_of} and n is {n}: which output is best is known at the "
                "end only; set stream to false or best_of to n",
            )
        return self.best_of

    def _prompts(self) -> list[Any]:
        single = isinstance(self.prompt, str) or (
            bool(self.prompt) and isinstance(self.prompt[0], int)
        )
        prompts: list[Any] = [self.prompt] if single else list(self.prompt)
        if not prompts:
            raise invalid("prompt", "prompt is empty; give at least one token")
        return prompts


def _input(
    prompt: str | list[int], index: int, max_model_len: int, max_tokens: int
) -> dict[str, Any]:
    if prompt == []:  # the scheduler judges an empty text by its special tokens
        raise invalid("prompt", f"prompt at index {index} is empty; give at least one token")
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if len(prompt) >= max_model_len:  # also without output, a prompt leaves room for one token
        part = f"prompt at index {index}"
        length = f"{max_model_len} tokens"
        raise context_length_exceeded(length, len(prompt), max(1, max_tokens), part=part)
    return {"prompt_token_ids": pb.TokenIds(ids=prompt)}


@dataclass(frozen=True, slots=True)
class CompletionFormatter:
    """Formats a choice as text."""

    prompt_logprobs_in_choices: ClassVar[bool] = True

    envelope: Envelope
    tokens_as_ids: bool = False
    stop_token_ids: frozenset[int] = frozenset()

    def under(self, envelope: Envelope) -> "CompletionFormatter":
        """The same formatter with another envelope."""
        return replace(self, envelope=envelope)

    def opening(self, index: int) -> dict[str, Any] | None:
        """None: nothing comes before the text."""
        return None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A chunk with text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def ending(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The last chunk, with the finish reason."""
        return {**self.piece(index, text), **ended_by(finish, self.stop_token_ids)}

    def whole(self, index: int, text: str, finish: pb.Finish) -> dict[str, Any]:
        """The whole text, with the keys of a last chunk."""
        return self.ending(index, text, finish)

    def logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        """Four arrays with an entry for each token; `top_logprobs` always has the token itself.

        `top_logprobs` is keyed by text. If several tokens have the same text, such as parts of
        characters, the likeliest one counts. The first token of an echoed prompt has null in both.
        """
        return {
            "tokens": [self._name(each.token) for each in tokens],
            "token_logprobs": [json_logprob(each.token.logprob) for each in tokens],
            "top_logprobs": [
                None if each.token.logprob is None else self._by_name((*each.top, each.token))
                for each in tokens
            ],
            "text_offset": [each.offset for each in tokens],
        }

    def _name(self, candidate: Candidate) -> str:
        return candidate.name if self.tokens_as_ids else candidate.text

    def _by_name(self, candidates: Iterable[Candidate]) -> dict[str, float | None]:
        logprobs: dict[str, float | None] = {}
        for candidate in candidates:
            logprobs.setdefault(self._name(candidate), json_logprob(candidate.logprob))
        return logprobs
