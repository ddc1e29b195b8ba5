"""The endpoints, a module for each: from a request's body to a job, and the form of its answer.

This code needs no connections or schedulers, so helper processes run it too.
"""
