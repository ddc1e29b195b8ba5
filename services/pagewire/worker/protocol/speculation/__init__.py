"""Guesses of a sequence's next tokens: which, and how many. Not here: the rows of steps."""
