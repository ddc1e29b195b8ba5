"""EAGLE-3 heads: one layer that guesses from the hidden states of its target."""
