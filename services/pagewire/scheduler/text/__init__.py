"""Text: the tokenizer, chat templates, incremental detokenization and stop strings.

Nothing here depends on requests or workers.
"""
