"""The kernels alone, timed on this machine's GPU beside plain torch."""
