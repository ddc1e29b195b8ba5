"""The schedulers: the link to each, the choice between them, and what follows a lost one.

`schedulers` is what other rooms use. Below it, `link` knows one scheduler, `connection` carries its
messages, and `delivery` gives their tokens to generations. `isolated_runs` runs suspects alone.
"""
