"""What an answer shows beside its text, on request: token ids, and token counts in every chunk.

Such answers are rare. So the normal writers ignore details, and this package adds them to the JSON.
"""
