"""From a Step message to a plan: decoding, checks, slot state, device plans.

Everything here is numpy and integers: no gRPC, no torch, no clock.
"""
