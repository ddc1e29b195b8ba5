"""Fields of /v1/messages that are hints, or refused unless their value changes nothing.

See `pagewire.gateway.api.unsupported`.
"""

from pagewire.gateway.api.unsupported import COMMON, COMMON_HINTS, Neutral

# `cache_control`: the prefix cache needs no marks. `inference_geo`: there is only one location.
MESSAGES_HINTS = COMMON_HINTS | {"cache_control", "diagnostics", "inference_geo", "speed"}
MESSAGES: Neutral = {
    **COMMON,
    "container": (),
    # Without edits, or with the edit of Claude Code that keeps all thinking.
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "output_format": (),
    "chat_template_kwargs": ({},),
    "max_completion_tokens": (),
}
BLOCK_HINTS = frozenset({"cache_control", "citations", "caller"})
TOOL_HINTS = frozenset(
    {"cache_control", "eager_input_streaming", "input_examples", "allowed_callers"}
)
THINKING_HINTS = frozenset({"budget_tokens", "display"})
OUTPUT_CONFIG: Neutral = {"task_budget": ()}
TOOL: Neutral = {"defer_loading": (False,)}
