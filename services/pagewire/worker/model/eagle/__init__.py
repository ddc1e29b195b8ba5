"""EAGLE-3 heads: one layer that guesses from the hidden states of its target.

Which tokens a head drafts in a step, and its KV, belong to `runtime`.
"""
