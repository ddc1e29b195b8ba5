"""Simulated GPUs: workers that take a device's time without a model, and replays of traces.

The worker's protocol and the scheduling core are used unchanged; nothing here needs torch.
"""
