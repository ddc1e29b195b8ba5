"""From a model's text to events: reasoning, content and tool calls, as the deltas arrive.

Formats are data in `pagewire.output_formats`. Pure: no I/O, no clock, and nothing of HTTP or of
OpenAI's JSON.
"""
