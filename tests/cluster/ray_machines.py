"""A Ray cluster of a head and several machines on loopback, told by lines on standard input.

    python -m tests.cluster.ray_machines FOLDER NAME...

Says the address of the cluster. `kill NAME` then kills all of Ray on a machine at once, as a loss
of power does; each answer is the line. Files of a machine are in its folder in FOLDER. All ends
with standard input.
"""

import os
import sys
from pathlib import Path

from bench.kit.waiting import PATIENCE_S

MEMORY_BYTES = 4 << 30
_STORE_BYTES = 80 << 20
#: Ray gives a machine 30 s to start, which a busy one may not have.
_TRIES = 5


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    # Without it Ray takes the machine's own address.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.update({"RAY_gcs_server_port_wait_time_s": str(int(PATIENCE_S))})
    from ray.cluster_utils import Cluster

    def machine(name, num_cpus):
        return {
            "num_cpus": num_cpus, "memory": MEMORY_BYTES, "object_store_memory": _STORE_BYTES,
            "node_ip_address": "127.0.0.1",
            "env_vars": {"GNNSERVE_CLUSTER_FOLDER": str(folder / name)},
        }  # fmt: skip

    head = {**machine("head", 0), "include_dashboard": False}
    machines = {}
    try:
        cluster = tried(lambda: Cluster(True, connect=False, head_node_args=head))
        machines["head"] = cluster.head_node
        for name in names:
            one = machine(name, 1)
            machines[name] = tried(lambda one=one: cluster.add_node(wait=False, **one))
        cluster.wait_for_nodes(timeout=PATIENCE_S)
        say(cluster.address)
        for line in sys.stdin:
            _, name = line.split()
            kill(machines.pop(name))
            say(line.strip())
    finally:
        for one in machines.values():
            kill(one)


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tried(start):
    """Return what `start` does, which may fail a few times."""
    for _ in range(_TRIES - 1):
        try:
            return start()
        except Exception as error:
            sys.stderr.write(f"{error}\n")
    return start()


def kill(machine):
    """Kill the processes of Ray on a machine; its workers end with them."""
    machine.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main()
