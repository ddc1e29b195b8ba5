"""HTTP: the server's protocol, the routes, and what the gateway says of itself.

What a field of a request means belongs to `api`, how an answer is written to `answers`, and how a
scheduler is reached to `routing`. A body becomes a Job or a call in `parsing`, which `app` runs.
"""
