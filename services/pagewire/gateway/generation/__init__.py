"""A generation in the gateway: its request, its tokens and their log probabilities.

The lowest layer of the gateway: `routing` writes into a generation, `http` reads from it.
"""
