"""The HTTP gateway: an OpenAI-style API in front of schedulers.

The process has no model and no tokenizer. `server` starts it; the packages below are its parts.
"""
