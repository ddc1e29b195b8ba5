"""Structured output: from what a client asks for to a grammar that is known to compile.

Matching output with it belongs to the worker.
"""
