"""The promise of a cluster of unlike machines: it follows from one of their pools, for all.

If each machine promised a multiple of its own solo time, a slow one would promise itself more time
and never be late. So the solo time is that of the reference pool, which the operator names, and a
request's target is the same wherever it runs and however often it is sent again.
"""

from collections.abc import Mapping
from math import exp, log

from serve.errors import ConfigError


def promised_ns(reference_solo_ns: int, qos_factor: float) -> int:
    """Return the target of a request whose solo time on the reference pool is known."""
    return int(qos_factor * reference_solo_ns)


def pace_of(run_ns: Mapping[str, float], reference_ns: Mapping[str, float]) -> float:
    """Return a pool's speed as a multiple of the reference pool's.

    Args:
        run_ns: Calibrated run times on the pool, by what was run: a model and a size.
        reference_ns: Those on the reference pool.

    The geometric mean over what ran on both; raises ConfigError when nothing did.
    """
    both = run_ns.keys() & reference_ns.keys()
    if not both:
        raise ConfigError(
            f"no run is calibrated on both pools: {sorted(run_ns)} here, "
            f"{sorted(reference_ns)} on the reference pool"
        )
    return exp(sum(log(reference_ns[name] / run_ns[name]) for name in both) / len(both))
