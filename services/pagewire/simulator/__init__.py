"""Simulated GPUs: workers that take a device's time without a model, and replays of traces.

It uses the worker's protocol and the scheduling core as they are; nothing here needs torch.
"""
