"""Fields of OpenAI or vLLM that Pagewire does not support yet.

Such a field is accepted with a value that changes nothing, and refused otherwise: a client must not
believe that an option works when it does not. Any other field is unknown and refused.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pagewire.errors import invalid

Neutral = Mapping[str, tuple[Any, ...]]

# Field: the values that change nothing. null always changes nothing.
COMMON: Neutral = {
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "request_id": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
}
CHAT: Neutral = {
    **COMMON,
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),  # has no effect without tools
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "include_reasoning": (),
}
COMPLETION: Neutral = {
    **COMMON,
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}
TOKENIZATION: Neutral = {
    "continue_final_message": (False,),
    "chat_template": (),
    "tools": ([],),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
}
DETOKENIZATION: Neutral = {}
STREAM_OPTIONS: Neutral = {
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}
MESSAGE: Neutral = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "refusal": (),
    "audio": (),
    "reasoning": (),
    "reasoning_content": (),
    "annotations": ([],),
}


def refuse_extras(model: BaseModel, neutral: Neutral, prefix: str = "") -> None:
    """RequestError for the first extra field of `model` that is unknown or would have an effect."""
    for name, value in (model.model_extra or {}).items():
        field = prefix + name
        if name not in neutral:
            raise invalid(field, f"{field} is not a known field; remove it")
        if value is not None and not any(_same(value, accepted) for accepted in neutral[name]):
            raise invalid(field, f"{field} is not supported yet; remove it")


def _same(value: Any, accepted: Any) -> bool:
    """Equality of value and type: in Python true equals 1."""
    return type(value) is type(accepted) and bool(value == accepted)
