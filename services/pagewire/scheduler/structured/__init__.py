"""Structured output: from a client's request to a grammar that is known to compile.

The worker matches output with the grammar.
"""
