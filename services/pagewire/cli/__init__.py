"""The `pagewire` command: `main` puts together what `commands` define."""
