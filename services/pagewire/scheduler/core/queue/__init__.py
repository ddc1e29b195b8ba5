"""The waiting queue, and the policies that order it."""
