"""Quantized weights: their description in config.json, their storage in checkpoints, and their
computation from plain weights.

Products with quantized weights belong to `ops`. Modules that read config.json need no torch.
"""
