"""The scheduling core: plain Python without I/O, event loop or clock.

Tests drive it with integers.
"""
