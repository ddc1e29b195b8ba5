"""Quantized copies of model folders: `pagewire quantize`, with and without calibration texts.

What a format means and how it is stored belongs to `model/quantization`. Nothing here serves.
"""
