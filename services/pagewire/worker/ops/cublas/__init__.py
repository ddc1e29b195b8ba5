"""GEMMs by cuBLASLt, with the algorithm that was measured to be the fastest for each shape.

The bindings of the library, the choice of algorithms, and tiles that its heuristics do not list.
"""
