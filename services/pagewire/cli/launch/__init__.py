"""Service processes on this machine: started, watched, restarted and ended."""
