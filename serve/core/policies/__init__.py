"""Grouping policies: one file each, registered by name.

To add one, write its file, import it here and name it in a configuration; the contract tests
find it by themselves.
"""

from serve.core.policies import bmc, bqt, fifo, lmcf, slack, sqtf
from serve.core.policies.base import POLICIES, Policy, register_policy

__all__ = [
    "POLICIES",
    "Policy",
    "bmc",
    "bqt",
    "fifo",
    "get_policy",
    "lmcf",
    "register_policy",
    "slack",
    "sqtf",
]


def get_policy(name: str) -> Policy:
    """Return the policy called `name`; raise ConfigError that lists the choices."""
    return POLICIES.get_named(name)
