"""From bodies to jobs: small bodies on the event loop, others in helper processes.

`api` defines what a body may contain.
"""
