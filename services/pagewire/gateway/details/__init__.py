"""What an answer shows beside its text, on request: token ids, and token counts in every chunk.

Such answers are rare, so what writes all others knows nothing of them: this room adds to its JSON.
"""
