"""A conversation with tools as every chat endpoint asks for it, independent of a body's form.

It becomes a scheduler's input, and says how the output is read: which formats, which calls.
"""
