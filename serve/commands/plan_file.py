"""What descriptions of machines to plan for have in common: their machines, and what tasks need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from serve.core.placement.job import JobMachine
from serve.errors import ConfigError
from serve.toml_tables import Count, Section

_GBIT_S = 1e9 / 8

Positive = Annotated[float, msgspec.Meta(gt=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class MachineTable(Section, frozen=True, kw_only=True):
    """Machines that are alike."""

    name: str
    count: Count = 1
    #: What tasks may take, by resource.
    has: dict[str, Amount]
    #: Of its network interface, each way.
    gbit_s: Positive
    #: How many times as fast as described it runs a worker, or a lane.
    speed: Positive = 1.0


@dataclass(frozen=True)
class DescribedMachines:
    """The machines of a description."""

    where: str
    resources: tuple[str, ...]
    machines: tuple[JobMachine, ...]
    speeds: tuple[float, ...]

    def demand(self, needs: Mapping[str, float], key: str) -> tuple[float, ...]:
        """Return what a task needs of each resource; raises ConfigError for what none has."""
        if unknown := [name for name in needs if name not in self.resources]:
            raise ConfigError(
                f"{self.where}: {key}.needs.{unknown[0]}: no machine has it; known: "
                f"{', '.join(self.resources)}"
            )
        return tuple(needs.get(resource, 0.0) for resource in self.resources)


def described_machines(tables: Sequence[MachineTable], most: int, where: str) -> DescribedMachines:
    """Return the machines, at most `most`; raises ConfigError that begins with `where`."""
    resources = tuple(dict.fromkeys(name for one in tables for name in one.has))
    machines: list[JobMachine] = []
    speeds: list[float] = []
    for table in tables:
        for number in range(min(table.count, most + 1)):
            name = table.name if table.count == 1 else f"{table.name}-{number}"
            has = tuple(table.has.get(resource, 0.0) for resource in resources)
            network = table.gbit_s * _GBIT_S
            machines.append(JobMachine(name, has, network, network))
            speeds.append(table.speed)
    if not 0 < len(machines) <= most:
        raise ConfigError(f"{where}: 1 to {most} machines, got {len(machines)}")
    if len({machine.name for machine in machines}) < len(machines):
        raise ConfigError(f"{where}: machines: two have one name")
    return DescribedMachines(where, resources, tuple(machines), tuple(speeds))
