"""A worker whose model is an external program, which reads and writes JSON lines.

Torch-free. `loading` starts the program and makes the backend; docs/command.md has the protocol.
"""
