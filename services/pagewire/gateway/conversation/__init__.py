"""A conversation with tools, shared by all chat endpoints and independent of a body's form.

It becomes a scheduler's input. It also determines the formats and calls that are read from the
output.
"""
