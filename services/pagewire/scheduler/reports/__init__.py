"""What a scheduler reports of its work: log lines of requests and of throughput, vLLM's metrics.

Metrics that the engine counts as it goes are in `scheduler/metrics.py`.
"""
