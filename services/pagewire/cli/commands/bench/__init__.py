"""`pagewire bench`: one module a command."""
