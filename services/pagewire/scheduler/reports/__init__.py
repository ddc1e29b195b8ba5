"""Reports of a scheduler's work: log lines of requests and of throughput, vLLM's metrics.

Metrics that the engine counts are in `scheduler/metrics.py`.
"""
