"""Snapshots of the scheduler and its workers for live views: sizes, counts and times.

Without requests from gateways, they cost one comparison a step. No prompt is read.
"""
