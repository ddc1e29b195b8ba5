"""The configuration of a model: the table of families, and how config.json is read.

The computation belongs to `model`. Nothing here imports torch, because a simulated worker reads
configurations, too.
"""

from pagewire.worker.model.config.families import FAMILIES
from pagewire.worker.model.config.family import Family
from pagewire.worker.model.config.model_config import ModelConfig
from pagewire.worker.model.config.reading import parse_model_config, read_model_config
from pagewire.worker.model.config.rope import RopeConfig

__all__ = [
    "FAMILIES",
    "Family",
    "ModelConfig",
    "RopeConfig",
    "parse_model_config",
    "read_model_config",
]
