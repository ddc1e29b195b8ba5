"""A generation as the gateway follows it: its request, its tokens and their log probabilities.

The lowest room of the gateway: `routing` writes into a generation, `http` reads from it.
"""
