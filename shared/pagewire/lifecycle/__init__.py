"""What the process of every service needs: signals, watchdog, logs, metrics, loop lag."""
