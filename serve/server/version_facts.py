"""Rules for the versions of a model, as transports see and change them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from serve.core.versions.rules import VersionRules


@dataclass(frozen=True, slots=True)
class VersionChange:
    """A change of a model's rules: exactly one of these."""

    #: Percent by version, empty for the newest that loads; with the canary among them.
    split: Mapping[int, float] | None = None
    canary: int | None = None
    #: Version that runs requests once more; 0 ends that.
    shadow: int | None = None
    shadow_percent: float = 100.0
    #: Go back to the rules before the last change.
    roll_back: bool = False


class ShadowCounts(NamedTuple):
    """How the shadow runs of a version compared with the answers that clients got."""

    compared: int = 0
    #: Of these: off by more than a thousandth of the answer's greatest element.
    different: int = 0
    #: Runs that ended in an error; and requests that were not run again, for want of a pause.
    failed: int = 0
    skipped: int = 0
    #: Largest difference of an element seen, and its share of the answer's greatest element.
    most_absolute: float = 0.0
    most_relative: float = 0.0


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """The rules of one model, and what came of them."""

    model: str
    rules: VersionRules
    #: The rules before the last change; None when there are none to go back to.
    previous: VersionRules | None
    #: The version that answers most requests which name none; None when they are refused.
    main: int | None
    served: tuple[int, ...]
    #: Why the last canary was taken back; empty when it was not.
    taken_back: str = ""
    #: Why the rules are not on disk, so that they end with the server; empty when they are.
    not_kept: str = ""
    #: Of the shadow; None without one.
    shadow: ShadowCounts | None = None
