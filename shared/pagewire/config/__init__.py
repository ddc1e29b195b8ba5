"""Configuration of every process, as frozen dataclasses: a module a service.

One field is one setting: a command-line flag (`--num-blocks`), an environment variable
(`PAGEWIRE_NUM_BLOCKS`) and a key of a configuration file (`num_blocks`). The command line builds
its flags from these classes, so only these classes have a setting's help text, type and default.
`shared` has the settings that two services share, and `yaml_files` reads files.
"""

from pagewire.config.fields import setting
from pagewire.config.gateway import GatewayConfig
from pagewire.config.process import ProcessConfig
from pagewire.config.scheduler import SchedulerConfig
from pagewire.config.simulated_worker import SimulatedWorkerConfig
from pagewire.config.worker import WorkerConfig

__all__ = [
    "GatewayConfig",
    "ProcessConfig",
    "SchedulerConfig",
    "SimulatedWorkerConfig",
    "WorkerConfig",
    "setting",
]
