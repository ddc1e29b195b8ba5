"""Embeddings, scores and reranking: the bodies of their requests, and the form of their answers.

This package handles the inputs and results of one request. Schedulers compute the results, and
`answers` sends them.
"""
