"""Fields of the configuration classes as flags, environment variables and file keys."""
