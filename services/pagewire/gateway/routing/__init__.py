"""The schedulers: the link to each, the choice between them, and what follows a lost one.

`schedulers` is what other rooms use. `link` knows one scheduler, `connection` carries its messages,
and `delivery` gives their tokens to generations. `selection` chooses among links. `waiting` has the
generations without a scheduler, and `isolated_runs` runs suspects among them alone.
`calls` has the calls that generate nothing.
"""
