"""The worker: one model on one device, driven by a scheduler's steps."""

import os

# Idle CPU threads of torch sleep. If they spun, the scheduler and the gateway of a small machine
# would lose its cores. OpenMP reads this once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
