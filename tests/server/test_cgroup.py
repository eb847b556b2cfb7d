"""Limits of control groups, read from made-up trees."""

import os

import pytest

from serve.config_device import DeviceConfig
from serve.server.cgroup import Limits, find_limits
from serve.server.device import find_device

GIB = 1 << 30
V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
V1_CPU = "31 24 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "32 24 0:28 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
OTHER = r"33 24 8:1 / /a\040disk rw - ext4 /dev/sda1 rw"


BURSTABLE = "kubepods.slice/kubepods-burstable.slice"


def make(folder, cgroup, mounts, files):
    """A root folder with these groups, mounts and files of groups."""
    proc = folder / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("\n".join(cgroup) + "\n")
    (proc / "mountinfo").write_text("\n".join([OTHER, *mounts]) + "\n")
    (folder / "proc" / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "limits"),
    [
        pytest.param([], [], {}, Limits(None, None), id="no control groups"),
        pytest.param(
            ["0::/"],
            [V2.format(root="/")],
            {"cpu.max": "150000 100000", "memory.max": str(2 * GIB)},
            Limits(1.5, 2 * GIB),
            id="a container with its own namespace",
        ),
        pytest.param(
            ["0::/system.slice/gnnserve.service"],
            [V2.format(root="/")],
            {
                "system.slice/gnnserve.service/memory.max": str(3 * GIB),
                "system.slice/gnnserve.service/cpu.max": "200000 100000",
                "system.slice/memory.max": "max",
                "system.slice/cpu.max": "max 100000",
            },
            Limits(2.0, 3 * GIB),
            id="a service: its own group's",
        ),
        pytest.param(
            ["0::/a/b/c"],
            [V2.format(root="/")],
            {
                "a/b/c/memory.max": str(8 * GIB),
                "a/b/c/cpu.max": "800000 100000",
                "a/b/memory.max": "max",
                "a/b/cpu.max": "max 100000",
                "a/memory.max": str(4 * GIB),
                "a/cpu.max": "50000 20000",
                "a/elsewhere/memory.max": str(1 * GIB),
            },
            Limits(2.5, 4 * GIB),
            id="the smallest of those above",
        ),
        pytest.param(
            ["0::/a"],
            [V2.format(root="/")],
            {"a/memory.max": "max", "a/memory.high": str(GIB)},
            Limits(None, GIB),
            id="memory beyond which it is slowed down",
        ),
        pytest.param(
            ["0::/kubepods/pod1/box"],
            [V2.format(root="/kubepods/pod1")],
            {"box/memory.max": "max", "memory.max": str(5 * GIB)},
            Limits(None, 5 * GIB),
            id="a mount that shows a part",
        ),
        pytest.param(
            ["0::/../elsewhere"],
            [V2.format(root="/")],
            {"memory.max": str(6 * GIB)},
            Limits(None, 6 * GIB),
            id="a group outside of the namespace",
        ),
        pytest.param(
            ["5:memory:/docker/x", "3:cpu,cpuacct:/docker/x", "0::/"],
            [V1_CPU.format(root="/docker/x"), V1_MEMORY.format(root="/docker/x")],
            {
                "memory/memory.limit_in_bytes": str(7 * GIB),
                "cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            Limits(3.0, 7 * GIB),
            id="version 1 in a container",
        ),
        pytest.param(
            ["5:memory:/top/low", "3:cpu,cpuacct:/top/low"],
            [V1_CPU.format(root="/"), V1_MEMORY.format(root="/")],
            {
                "memory/top/memory.limit_in_bytes": str(9 * GIB),
                "memory/top/low/memory.limit_in_bytes": "9223372036854771712",
                "cpu,cpuacct/top/cpu.cfs_quota_us": "100000",
                "cpu,cpuacct/top/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/top/low/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/top/low/cpu.cfs_period_us": "100000",
            },
            Limits(1.0, 9 * GIB),
            id="version 1, nested",
        ),
        pytest.param(
            ["0::/"],
            [],
            {"memory.max": str(GIB)},
            Limits(None, None),
            id="groups that are not mounted",
        ),
        pytest.param(
            ["0::/a"],
            [V2.format(root="/")],
            {"a/cpu.max": "max 100000", "a/memory.max": "max", "a/memory.high": "max"},
            Limits(None, None),
            id="no limit at all",
        ),
        pytest.param(
            ["0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice/cri-1.scope"],
            [V2.format(root="/")],
            {
                f"{BURSTABLE}/kubepods-pod1.slice/cri-1.scope/cpu.max": "300000 100000",
                f"{BURSTABLE}/kubepods-pod1.slice/cpu.max": "350000 100000",
                f"{BURSTABLE}/kubepods-pod1.slice/cri-1.scope/memory.max": str(6 * GIB),
                f"{BURSTABLE}/memory.max": str(60 * GIB),
            },
            Limits(3.0, 6 * GIB),
            id="a pod seen from the node",
        ),
        pytest.param(
            ["0::/kubepods/besteffort/pod1/box"],
            [V2.format(root="/")],
            {"kubepods/memory.max": str(48 * GIB), "kubepods/cpu.max": "max 100000"},
            Limits(None, 48 * GIB),
            id="a pod without limits: the node's",
        ),
        pytest.param(
            ["0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope"],
            [V2.format(root="/")],
            {"user.slice/user-1000.slice/memory.high": str(2 * GIB)},
            Limits(None, 2 * GIB),
            id="a shell of a user with a limit",
        ),
        pytest.param(
            ["0::/docker/abc"],
            [V2.format(root="/docker/abc"), V2.format(root="/docker/abc").replace("fs/", "fs2/")],
            {"cpu.max": "120000 100000", "memory.max": str(GIB)},
            Limits(1.2, GIB),
            id="a container that sees its group twice",
        ),
        pytest.param(
            ["0::/lxc/box/init.scope"],
            [V2.format(root="/lxc/box")],
            {"memory.max": str(4 * GIB), "init.scope/memory.max": "max", "cpu.max": "400000 50000"},
            Limits(8.0, 4 * GIB),
            id="init in a container of LXC, a period of 50 ms",
        ),
        pytest.param(
            ["7:memory:/", "4:cpu,cpuacct:/", "1:name=systemd:/x", "0::/x"],
            [
                V1_CPU.format(root="/"),
                V1_MEMORY.format(root="/"),
                V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
            ],
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "unified/x/memory.max": str(5 * GIB),
            },
            Limits(None, 5 * GIB),
            id="both versions: limits of the second",
        ),
        pytest.param(
            ["7:memory:/ecs/task/box", "4:cpu,cpuacct:/ecs/task/box", "0::/"],
            [V1_CPU.format(root="/ecs/task/box"), V1_MEMORY.format(root="/ecs/task/box")],
            {
                "memory/memory.limit_in_bytes": str(3 * GIB),
                "cpu,cpuacct/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            Limits(0.5, 3 * GIB),
            id="version 1, half a core",
        ),
        pytest.param(
            ["0::/a"],
            [V2.format(root="/")],
            {"a/cpu.max": "200000 0", "a/memory.max": "", "memory.max": "much"},
            Limits(None, None),
            id="files with nonsense",
        ),
        pytest.param(
            ["0::/a:b/c"],
            [V2.format(root="/")],
            {"a:b/c/memory.max": str(GIB), "a:b/cpu.max": "100000 100000"},
            Limits(1.0, GIB),
            id="a name with a colon",
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path, cgroup, mounts, files, limits):
    assert find_limits(make(tmp_path, cgroup, mounts, files)) == limits


def test_a_tree_of_this_machine_can_be_read():
    found = find_limits()
    assert found.cores is None or found.cores > 0
    assert found.memory_bytes is None or found.memory_bytes > 0


def device(root, monkeypatch, cores=8, spare_lanes=True, **settings):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    return find_device(DeviceConfig(kind="cpu", **settings), spare_lanes=spare_lanes, root=root)


def limited(folder, quota, memory_bytes):
    files = {"a/b/memory.max": "max", "a/memory.max": str(memory_bytes), "a/cpu.max": quota}
    return make(folder, ["0::/a/b"], [V2.format(root="/")], files)


def test_lanes_and_budget_keep_within_the_limits(tmp_path, monkeypatch):
    found = device(limited(tmp_path, "250000 100000", 4 * GIB), monkeypatch)
    assert found.parallelism == 2
    assert found.lane_cores == ((),) * 8, "four a core, pinned to none"
    assert found.budget_bytes + 8 * found.keep_bytes == 3 * GIB


@pytest.mark.parametrize(("quota", "at_once"), [("50000 100000", 1), ("100000 100000", 1)])
def test_a_small_quota_leaves_one_lane_at_work(tmp_path, monkeypatch, quota, at_once):
    root = limited(tmp_path, quota, 4 * GIB)
    assert device(root, monkeypatch, spare_lanes=False).parallelism == at_once


def test_a_quota_of_all_cores_is_none(tmp_path, monkeypatch):
    found = device(limited(tmp_path, "800000 100000", 64 * GIB), monkeypatch, spare_lanes=False)
    assert found.parallelism == 8
    assert found.lane_cores == tuple((core,) for core in range(8))
    assert found.budget_bytes + 8 * found.keep_bytes == 24 * GIB, "of what the machine has free"


def test_what_the_configuration_says_is_kept(tmp_path, monkeypatch):
    root = limited(tmp_path, "200000 100000", 4 * GIB)
    found = device(root, monkeypatch, lanes=3, memory_budget="6 GiB", max_lane_requests=7)
    assert found.lane_requests == 7
    assert (len(found.lane_cores), found.parallelism) == (3, 2)
    assert found.budget_bytes + 3 * found.keep_bytes == 6 * GIB
