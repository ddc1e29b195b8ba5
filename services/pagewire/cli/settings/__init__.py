"""Settings: fields of configuration classes as options, environment variables and files."""
