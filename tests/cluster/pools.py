"""Pools, and what their servers say, as tests need them."""

import msgspec

from serve.cluster.figures import Figures
from serve.cluster.pool import Pool
from serve.cluster.registry import Announcement
from serve.cluster.replica import ReplicaSpec

S = 1_000_000_000
OLD = ReplicaSpec("c", "old.toml")
NEW = ReplicaSpec("c", "new.toml", generation="2")
POOL = Pool(OLD, 2, "127.0.0.1", 1, digest="old")
ON_TRIAL = msgspec.structs.replace(
    POOL, spec=NEW, digest="new", before=OLD, digest_before="old", trial_s=60.0
)


def announced(machine, generation="", ready=True, **figures):
    """Return what the server of a machine says."""
    return Announcement(
        f"{machine}:1", f"{machine}:2", 1, machine, ready=ready, generation=generation,
        figures=Figures(**figures),
    )  # fmt: skip
