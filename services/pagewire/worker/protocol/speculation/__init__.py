"""Torch-free: drafts of the next tokens of a sequence, and which of them its output has got."""
