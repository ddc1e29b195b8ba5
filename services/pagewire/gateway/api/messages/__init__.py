"""/v1/messages: Anthropic's Messages API.

`request` reads a body, `blocks` its messages, and `tools` its tools. `events` writes the stream of
an answer and the message that it adds up to. `errors` has the form of errors on these paths, and
`unsupported` the fields that are refused.
"""
