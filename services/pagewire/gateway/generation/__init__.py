"""One choice's generation as the gateway follows it: its input, its news, its log probabilities.

The lowest room of the gateway: links write into it, answers read from it.
"""
