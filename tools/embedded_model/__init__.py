"""The maker of the embedded chat model: a corpus grammar, a tokenizer and a training script."""
