"""Embeddings, scores and reranking: the bodies of their requests, and the form of their answers.

Here is what one request has of inputs and results. How the results are computed is the
scheduler's; how an answer is sent is in `answers`.
"""
