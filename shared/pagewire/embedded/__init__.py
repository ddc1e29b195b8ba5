"""The chat model inside the package: a Hugging Face folder like any other."""
