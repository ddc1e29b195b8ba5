"""Text: the tokenizer, chat templates, incremental detokenization and stop strings."""
