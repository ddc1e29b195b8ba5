"""Benchmarks: loads, measurements and their results. Used by the command line and `benchmarks/`.

Options and printing belong to `cli/commands`.
"""
