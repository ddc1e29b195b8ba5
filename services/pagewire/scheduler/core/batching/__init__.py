"""Continuous batching on one worker: slots, the plan of each step, and its answer."""
