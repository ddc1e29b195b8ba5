"""Helper processes of a service: they compute what would hold its event loop up.

`pool` is the service's side, `process` the helper's. What a helper computes belongs to the service.
"""
