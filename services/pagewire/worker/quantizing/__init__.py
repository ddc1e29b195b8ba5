"""Quantized copies of model folders: `pagewire quantize`, with and without calibration texts.

The meaning and storage of formats belong to `model/quantization`. Nothing here serves requests.
"""
