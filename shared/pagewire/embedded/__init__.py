"""The chat model that travels inside the package: a Hugging Face folder like any other."""
