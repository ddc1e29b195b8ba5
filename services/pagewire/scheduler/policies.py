"""The scheduling policies by name: built-in ones, and those that other distributions install."""

from collections.abc import Callable
from importlib.metadata import entry_points

from pagewire.config import SchedulerConfig
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.queue.fair_share import FairShare
from pagewire.scheduler.core.queue.longest_prefix import LongestPrefix
from pagewire.scheduler.core.queue.policy import (
    Deadline,
    FirstComeFirstServed,
    Priority,
    SchedulingPolicy,
)
from pagewire.scheduler.core.routing import ROUTERS

ENTRY_POINTS = "pagewire.scheduling_policies"

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "longest-prefix": LongestPrefix,
    "deadline": Deadline,
    "fair-share": FairShare,
}


def make_policy(name: str) -> SchedulingPolicy:
    """A fresh policy; ValueError for an unknown name, or an installed object that is not a policy.

    Another distribution adds a policy by an entry point in the group ENTRY_POINTS. It names a
    subclass of SchedulingPolicy without constructor arguments. Built-in names cannot be replaced.
    """
    if name in POLICIES:
        return POLICIES[name]()
    installed = entry_points(group=ENTRY_POINTS)
    if name not in installed.names:
        known = ", ".join([*POLICIES, *sorted(installed.names - POLICIES.keys())])
        raise ValueError(f"policy {name!r} is not known; give one of {known}")
    policy = installed[name].load()()
    if not isinstance(policy, SchedulingPolicy):
        raise ValueError(f"policy {name!r} is a {type(policy).__name__}, not a SchedulingPolicy")
    return policy


def make_admission(config: SchedulerConfig, policy: SchedulingPolicy) -> Admission:
    """An empty queue in the order of the policy, and no workers."""
    return Admission(policy, ROUTERS[config.routing](), max(1, config.max_retry_attempts))
