"""Which tokens a constrained sequence may have: grammars, matchers and masks, on the CPU.

Nothing here needs torch. Applying a mask to logits belongs to `ops`.
"""
