"""The model: its configuration, weights, rotary table, KV cache, and the decoder over them."""
