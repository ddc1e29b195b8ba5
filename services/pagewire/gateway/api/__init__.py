"""The endpoints, a module for each: from a request's body to a job, and the form of its answer.

Nothing here knows connections or schedulers, so helper processes can run the same code.
"""
