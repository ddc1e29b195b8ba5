"""Drafts of a sequence's next tokens, and their number. Not here: the rows of steps."""
