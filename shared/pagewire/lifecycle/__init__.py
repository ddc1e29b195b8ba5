"""What the process of every service has: signals, watchdog, logs, metrics, measured loop lag."""
