"""The `pagewire` command line: `main` assembles the commands in `commands`."""
