"""/v1/responses: OpenAI's Responses API, without state between requests.

`request` reads a body, `items` its input, and `tools` its tools. `response` writes the object of
the answer, `events` the stream that adds up to it. `unsupported` has the fields that are refused.
"""
