"""Quantized weights: what config.json says of them, how checkpoints store them, how they are made.

What a product with such a weight computes belongs to `ops`. Modules that read config.json need no
torch.
"""
