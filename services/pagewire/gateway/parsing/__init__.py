"""From bodies to jobs: on the event loop where they are small, otherwise in helper processes.

What a body may contain belongs to `api`.
"""
