"""The parts that every service's process needs: signals, watchdog, logs, metrics, loop lag."""
