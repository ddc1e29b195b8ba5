"""Benchmarks: load, timing and reports, for the command line and for `benchmarks/`."""
