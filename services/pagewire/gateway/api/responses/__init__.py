"""/v1/responses: OpenAI's Responses API, without state between requests.

`request` reads a body; `items` its input and `tools` its tools. `response` is the object that is
answered, and `events` the stream that adds up to it. Fields that are refused are in `unsupported`.
"""
