"""The HTTP gateway: an OpenAI-style API in front of schedulers.

A process without a model or a tokenizer. `server` starts it; the rooms below hold its parts.
"""
