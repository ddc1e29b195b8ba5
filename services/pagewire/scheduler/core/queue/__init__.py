"""The queue: which waiting sequence is admitted next, by which policy."""
