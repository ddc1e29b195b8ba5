"""Fields of /v1/responses that are hints, or refused unless their value changes nothing.

See `pagewire.gateway.api.unsupported`.
"""

from pagewire.gateway.api.unsupported import COMMON, COMMON_HINTS, Neutral

# The answer repeats `metadata`.
RESPONSE_HINTS = (COMMON_HINTS - {"metadata"}) | {"access_programs"}
RESPONSE: Neutral = {
    **{name: values for name, values in COMMON.items() if name not in RESPONSE_HINTS},
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "moderation": (),
    "prompt": (),
    # Fields of /v1/chat/completions.
    "messages": (),
    "max_completion_tokens": (),
    "logprobs": (False,),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
# Clients repeat ids and states of items from earlier responses. No item is looked up by its id.
ITEM_HINTS = frozenset({"id", "status", "phase", "created_by", "agent", "recipient"})
PART_HINTS = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
FUNCTION_HINTS = frozenset({"allowed_callers"})
TEXT_HINTS = frozenset({"verbosity"})
# Summaries are not made: the reasoning itself is in the answer.
REASONING_HINTS = frozenset({"summary", "generate_summary", "context"})
CALL: Neutral = {"namespace": ()}
FUNCTION: Neutral = {"defer_loading": (False,), "async": (False,)}
