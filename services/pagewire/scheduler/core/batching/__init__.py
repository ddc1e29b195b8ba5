"""Continuous batching on one worker: slots, the plan of each step, and what its answer means."""
