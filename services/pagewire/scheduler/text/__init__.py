"""Text: the tokenizer, chat templates, incremental detokenization and stop strings.

Nothing here knows requests or workers.
"""
