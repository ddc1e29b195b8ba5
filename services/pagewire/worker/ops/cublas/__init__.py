"""GEMMs by cuBLASLt, each with the algorithm that was measured the fastest."""
