"""Kernels of decode steps whose rows may be drafts."""
