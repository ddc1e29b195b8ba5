"""Helper processes of a service, for computations that would block its event loop.

`pool` is the service's side, `process` the helper's. The functions that helpers call belong to the
services.
"""
