"""Fields of OpenAI or vLLM that requests may have beside those that Pagewire implements.

A hint is accepted with any value, because it has no effect on the output. A field that would change
the output is accepted only with a value that changes nothing: a client must not expect an effect
that an option does not have. See `unknown_fields.py` for all other fields.

docs/api.md lists every field; a test compares the list with these tables.
"""

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

# These fields describe the caller, or how OpenAI's and vLLM's own servers work.
COMMON_HINTS = frozenset(
    {
        "metadata",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_mm_kwargs",  # images and sounds are refused
        "safety_identifier",
        "service_tier",
        "session_id",
        "stream_interval",
        "user",
    }
)
CHAT_HINTS = COMMON_HINTS | {
    "media_io_kwargs",  # images and sounds are refused
    "mm_processor_kwargs",
    "verbosity",
}
COMPLETION_HINTS = COMMON_HINTS
TOKENIZATION_HINTS = frozenset({"media_io_kwargs", "mm_processor_kwargs"})
POOLING_HINTS = COMMON_HINTS | {
    "media_io_kwargs",  # images and sounds are refused
    "mm_processor_kwargs",
}
STREAM_OPTIONS_HINTS = frozenset({"include_obfuscation"})
MESSAGE_HINTS = frozenset({"annotations", "cache_control", "prompt_cache_breakpoint"})
PART_HINTS = frozenset({"annotations", "cache_control", "prompt_cache_breakpoint"})

# Field: the values that change nothing. null always changes nothing.
COMMON: Neutral = {
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "return_token_offsets": (False,),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "kv_transfer_params": ({},),
    "store": (False,),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}
CHAT: Neutral = {
    **{name: values for name, values in COMMON.items() if name != "thinking_token_budget"},
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "return_prompt_text": (False,),
    # Fields of /v1/completions.
    "prompt": (),
    "prompt_embeds": (),
    "suffix": ("",),
}
COMPLETION: Neutral = {
    **COMMON,
    "suffix": ("",),
    "prompt_embeds": (),
    # Fields of /v1/chat/completions.
    "messages": (),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "tools": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
_POOLING: Neutral = {
    "use_activation": (True,),
    "activation": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
EMBEDDING: Neutral = {
    **_POOLING,
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
}
# A pair is not cut, because its end matters.
_SCORES: Neutral = {
    **_POOLING,
    "softmax": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
}
SCORE: Neutral = {
    **_SCORES,
    "data_1": (),
    "data_2": (),
    "queries": (),
    "documents": (),
}
RERANK: Neutral = {
    **_SCORES,
    "rank_fields": ([],),
    "max_chunks_per_doc": (),
}
PART: Neutral = dict.fromkeys(
    ("image_url", "input_audio", "audio_url", "video_url", "file", "refusal"), ()
)
MESSAGE: Neutral = {
    "function_call": (),
    "refusal": (),
    "audio": (),
}
