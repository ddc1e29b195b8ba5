"""The stages of requests across the queue and the workers: intake, results, losses, end.

The engine runs these stages. The data of one request belongs to `requests`.
"""
