"""The commands: options and printing, one module for each command or group."""
