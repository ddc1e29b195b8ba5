"""What must hold before any test module is imported."""

import os
import sys
from pathlib import Path

import torch

# Triton reads this once, when it is imported, and transformers imports it too.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Makes tests/support importable from every test.
sys.path.insert(0, str(Path(__file__).parent))
