"""HTTP: the server's protocol, the routes, and the gateway's own status.

`app` calls `parsing`, which makes a Job or a call from a body. `api` interprets the fields of a
request, `answers` writes answers, and `routing` reaches the schedulers.
"""
