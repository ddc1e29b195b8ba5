"""The endpoints: a module for each, from a request's body to a job, and the shape of its answer.

Nothing here knows connections or schedulers; helper processes run the same code.
"""
