"""From a model's text to events: reasoning, content and tool calls, as the deltas arrive.

Formats are data in `pagewire.output_formats`. The code is pure: no I/O, no clock, and no HTTP or
OpenAI JSON.
"""
