"""/v1/messages: Anthropic's Messages API.

`request` reads a body; `blocks` its messages and `tools` its tools. `events` is the stream of an
answer and the message that it adds up to, `errors` the form of errors on these paths. Fields that
are refused are in `unsupported`.
"""
