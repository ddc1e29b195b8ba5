"""HTTP: the server's protocol, the routes, and how an answer is written to a connection.

What a field of a request means belongs to `api`, and how a scheduler is reached to `routing`.
A request becomes a Job (`parser_pool`), the job a Run (`run`), and its generations become choices
(`choices`) of an answer (`answer`), which is JSON (`paced_json`) or a stream of events (`sse`).
"""
