"""The schedulers: the link to each, the choice between them, and recovery from a lost one.

Other packages use `schedulers`. `link` has the state of one scheduler, `connection` carries its
messages, and `delivery` passes their tokens to generations. `selection` chooses among links.
`waiting` has the generations without a scheduler, and `isolated_runs` runs suspects among them
alone. `calls` has the calls that generate nothing.
"""
