"""HTTP: the server's protocol, the routes, and how an answer is written to a connection.

What a field of a request means belongs to `api`, and how a scheduler is reached to `routing`.
"""
