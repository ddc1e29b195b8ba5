"""What a live view shows of the scheduler and its workers: sizes, counts and times.

Nothing here runs while no gateway asks, except for one comparison a step. No prompt is read.
"""
