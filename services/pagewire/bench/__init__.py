"""Benchmarks: loads, measurements and their results. Used by the command line and `benchmarks/`.

`cli/commands` has the options and the printing.
"""
