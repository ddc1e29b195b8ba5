"""Help texts of every command: a line for each option, or all its details."""
