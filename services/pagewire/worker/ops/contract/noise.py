"""Constants of the random draw, which all implementations must share to draw the same tokens.

`reference.sampling` explains the method.
"""

from __future__ import annotations

import torch

# Rows below this temperature are greedy: 1 / temperature would leave the noise no bits.
GREEDY_BELOW = 1e-5

# Neighbouring token ids that form a group. A group is drawn first, then one of its ids.
GROUP = 8

# Added to the two halves of the seed, because the hash maps 0 to itself: the 32-bit golden ratio
# and a constant of xxHash32.
SEED_LOW_OFFSET = 0x9E3779B9
SEED_HIGH_OFFSET = 0x85EBCA77
# The multipliers of the 32-bit finalizer of MurmurHash3 (Appleby, 2011, `fmix32`).
MIX_FIRST = 0x85EBCA6B
MIX_SECOND = 0xC2B2AE35

LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # in float32
# For smaller v, -log(1 - v) is computed by its series: 1 - v would round the digits of v away.
SERIES_BELOW = 2.0**-6

# Upper bits of a logit in float32 that can differ between two logits of a model, by the dtype of
# the model's logits. Filters compare these bits only, so adjusted logits that differ in lower bits
# are tied.
KEY_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
