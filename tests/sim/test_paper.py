"""The systems of the GNNSched paper, and a device whose memory has a price."""

from collections import defaultdict
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.commands import LaunchTask
from serve.core.fleet.fleet import make_scheduler
from serve.core.types import Nanos
from serve.errors import ConfigError
from serve.sim.device import DeviceModel
from serve.sim.engine import Simulation
from serve.sim.paper import paper_system, shared_by
from tests.builders import MS
from tests.sim.test_engine import offered

MIB = 1 << 20


class Launches(Simulation):
    """Remembers the group of each task."""

    def __init__(self, system):
        super().__init__(make_scheduler(system.params), system.device)
        self.groups = defaultdict(list)

    def _obey(self, command):
        if isinstance(command, LaunchTask):
            self.groups[command.group_id].append(command.task_id)
        super()._obey(command)


def latencies_ms(name, requests, budget=64 * MIB, **model):
    model.setdefault("slowdown", (1.0,))
    system = paper_system(name, budget, DeviceModel(switch_ns=Nanos(0), **model))
    simulation = Launches(system)
    simulation.run(requests)
    rows = sorted(simulation.answered, key=lambda row: row.task.task_id)
    return [(row.answered_ns - row.task.arrived_ns) / MS for row in rows]


def groups_of(name, requests, budget):
    simulation = Launches(paper_system(name, budget, DeviceModel()))
    simulation.run(requests)
    return list(simulation.groups.values())


def test_default_runs_one_mps_base_four_and_mps_aggr_all():
    requests = [offered(number, 1) for number in range(6)]
    assert latencies_ms("default", requests) == [1, 2, 3, 4, 5, 6]
    assert latencies_ms("mps_base", requests) == [1, 1, 1, 1, 2, 2]
    assert latencies_ms("mps_aggr", requests) == [1] * 6


def test_tasks_share_a_device_that_one_of_them_keeps_partly_busy():
    assert shared_by(2, 4) == (1, 1, 1.5, 2)
    requests = [offered(number, 1) for number in range(3)]
    assert latencies_ms("mps_aggr", requests, slowdown=shared_by(2)) == [1.5] * 3


def test_memory_that_is_reserved_twice_costs_time_and_is_free_again_after_a_run():
    requests = [offered(0, 1, reserve=3 * MIB), offered(1, 2, reserve=2 * MIB)]
    paged = {"paging": 10.0, "capacity_bytes": 4 * MIB}
    # Ten times slower until the first is done, whose millisecond of work takes ten.
    assert latencies_ms("mps_aggr", requests, **paged) == [10, 11]
    assert latencies_ms("default", requests, **paged) == [1, 3]
    # GNNSched never reserves more than there is.
    assert latencies_ms("sqtf", requests, budget=4 * MIB, **paged) == pytest.approx([1, 3])


def test_paging_makes_nothing_faster():
    with pytest.raises(ValueError, match=r"paging must be at least 1, got 0\.5"):
        DeviceModel(paging=0.5)


def test_an_unknown_system_is_told():
    with pytest.raises(ConfigError, match="'mps' is not one of default, mps_base, mps_aggr, sqtf"):
        paper_system("mps", MIB, DeviceModel())


@pytest.mark.parametrize("name", ["sqtf", "bqt"])
def test_groups_of_two_batches_never_mix(name):
    """The second batch arrives while the first runs, and there is memory for all."""
    requests = [offered(0, 4), offered(1, 4), offered(2, 1, 1), offered(3, 1, 1)]
    groups = [set(group) for group in groups_of(name, requests, 64 * MIB)]
    assert groups == [{0, 1}, {2, 3}]


@given(
    reserves=st.lists(st.integers(1, 8), min_size=1, max_size=20),
    budget=st.integers(8, 40),
    name=st.sampled_from(["sqtf", "bqt"]),
)
def test_a_group_fits_and_is_full(reserves, budget, name):
    """Within one batch, whatever the order of the policy."""
    requests = [
        offered(number, 1 + number % 3, reserve=mib * MIB) for number, mib in enumerate(reserves)
    ]
    groups = groups_of(name, requests, budget * MIB)
    assert sorted(chain.from_iterable(groups)) == list(range(len(reserves)))
    sums = [sum(reserves[number] for number in group) for group in groups]
    assert max(sums) <= budget
    # gTH: groups of equal size, as few as can hold them all. A group is closed when it has as much,
    # or when the next task, which begins the following group, would not have fitted.
    threshold = -(-sum(reserves) // -(-sum(reserves) // budget))
    for before, (first, *_), total in zip(groups, groups[1:], sums, strict=False):
        assert total >= threshold or total + reserves[first] > budget, before
