"""What the server says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The device, its lanes and how requests are scheduled, at one moment."""

    version: str
    #: As shown to people: `cpu`, or the name of a CUDA device starting with `cuda`.
    device: str
    lanes: int
    #: Device memory that tasks may reserve: the budget less all weights.
    budget_bytes: int
    policy: str
    discipline: str
    #: `adaptive` or `fixed`.
    window: str
    qos_factor: float
