"""Rules of one model: which of its versions answer the requests that name none, and how many.

A request goes to a version by a hash of its id, so the same id always goes to the same version
while the rules are the same. When the share of the last version of a split grows, the requests that
it had before stay its own.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

#: Greatest version, as of the names of version folders.
MOST_VERSION = 10**18 - 1
#: Versions that share the requests of one model, at most.
MOST_SHARES = 16
#: Error of the sum of shares that rounding may make.
_ROUNDING = 1e-6
_WHOLE = 100.0


class VersionRules(msgspec.Struct, frozen=True):
    """What answers the requests that name no version; by default the newest that loads."""

    #: (version, percent of the requests), ascending by version, in all 100; one version is a pin.
    #: Empty for the newest version that loads.
    shares: tuple[tuple[int, float], ...] = ()
    #: Version of the shares that loses its share when it does worse than the others.
    canary: int | None = None
    #: Version that runs the same requests once more, for nobody; and of which share of them.
    shadow: int | None = None
    shadow_percent: float = _WHOLE

    def __post_init__(self) -> None:
        versions = [version for version, _ in self.shares]
        if len(versions) > MOST_SHARES:
            raise ValueError(f"split: {len(versions)} versions, at most {MOST_SHARES} may share")
        if versions != sorted(set(versions)):
            raise ValueError(f"split: versions {versions} must ascend, none twice")
        for version in (*versions, *(v for v in (self.shadow, self.canary) if v is not None)):
            if not 1 <= version <= MOST_VERSION:
                raise ValueError(f"version {version} must be a positive integer below 10^18")
        # Written so that NaN is refused.
        if not all(0 < percent <= _WHOLE for _, percent in self.shares):
            raise ValueError(f"split: each share must be above 0 and at most 100, got {self.told}")
        total = sum(percent for _, percent in self.shares)
        if self.shares and not abs(total - _WHOLE) <= _ROUNDING:
            raise ValueError(f"split: {self.told} is {total:g} percent in all, not 100")
        if self.canary is not None and (self.canary not in versions or len(versions) < 2):
            raise ValueError(
                f"canary: version {self.canary} must have a share beside another's, got {self.told}"
            )
        if not 0 < self.shadow_percent <= _WHOLE:
            raise ValueError(
                f"shadow: its share must be above 0 and at most 100, got {self.shadow_percent:g}"
            )
        if self.shadow is not None and self.shadow in versions:
            raise ValueError(f"shadow: version {self.shadow} answers requests already")

    @property
    def told(self) -> str:
        """The shares for people: `1=90 2=10`; empty without."""
        return " ".join(f"{version}={percent:g}" for version, percent in self.shares)

    def choose(self, model: str, request_id: str, serves: Callable[[int], bool]) -> int | None:
        """Return the version for a request of that id; None when none with a share is served.

        The share of a version that is not served goes to the others with a share, in proportion;
        all other requests stay where they are.
        """
        if not self.shares:
            return None
        version = _version_at(self.shares, _point(model, request_id))
        if serves(version):
            return version
        left = [share for share in self.shares if serves(share[0])]
        return _version_at(left, _point(model, request_id, "again")) if left else None

    def main(self, serves: Callable[[int], bool]) -> int | None:
        """Return the served version with the greatest share, the older of equals; None if none."""
        left = [(-percent, version) for version, percent in self.shares if serves(version)]
        return min(left)[1] if left else None

    def shadows(self, model: str, request_id: str) -> bool:
        """Return True when the shadow is to run a request of that id."""
        if self.shadow is None:
            return False
        return _point(model, request_id, "shadow") * _WHOLE < self.shadow_percent

    def without_canary(self) -> "VersionRules":
        """Return the rules with the canary's share given to the others, in proportion."""
        left = [share for share in self.shares if share[0] != self.canary]
        total = sum(percent for _, percent in left)
        # A product that is rounded, divided, may be above the whole.
        scaled = tuple(
            (version, min(_WHOLE, _WHOLE * percent / total)) for version, percent in left
        )
        return msgspec.structs.replace(self, shares=scaled, canary=None)


def _point(model: str, request_id: str, what: str = "") -> float:
    """Return a number in [0, 1) that looks drawn at random, the same for the same arguments."""
    text = "\0".join((what, model, request_id)).encode("utf-8", "surrogatepass")
    # 53 bits: all that a float holds, so that it is never 1.
    return (int.from_bytes(blake2b(text, digest_size=8).digest()) >> 11) / (1 << 53)


def _version_at(shares: Sequence[tuple[int, float]], point: float) -> int:
    """Return the version whose part of [0, 1), one after the other, holds the point."""
    left = point * sum(percent for _, percent in shares)
    for version, percent in shares:
        left -= percent
        if left < 0:
            return version
    return shares[-1][0]
