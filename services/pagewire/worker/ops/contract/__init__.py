"""What the runtime and every implementation of the operations agree on."""
