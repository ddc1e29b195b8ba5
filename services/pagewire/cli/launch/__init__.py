"""Starts, supervises and ends service processes on this machine."""
