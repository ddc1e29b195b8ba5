"""Stands in for GPUs: a worker that computes nothing but takes the time, and replays of traces."""
