"""From a Step message to a plan: decoding, checks, the mirror of the slots, device plans.

Everything here is numpy and integers: no gRPC, no torch, no clock.
"""
