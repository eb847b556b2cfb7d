"""Does a placed job take as long live as it does simulated?

    python -m bench.papers.dgtp_live [--quick] [--jobs 6]

Small trainings on three machines are placed at random and run twice: simulated
(``serve.core.placement.play``), and live on this machine. Live, a run of a task is a wait, and what
is sent between machines goes over TCP on localhost, at the rate that ``sharing.equal`` gives each
flow at the time. A token bucket in front of each connection keeps to it, as ``tc`` would: the
network of this machine is much faster than those that are described. What is compared is the time
until all runs have ended.
"""

import argparse
import asyncio
import time
from functools import partial
from random import Random
from typing import Any

from bench.kit.script import Script, Table
from serve.core.placement.job import (
    Assignment,
    DistributedJob,
    JobLink,
    JobMachine,
    JobRole,
    Volumes,
    drawn_volumes,
)
from serve.core.placement.play import played
from serve.core.placement.sharing import ActiveFlow, equal
from serve.core.placement.training import TaskKind, TrainingShape, TrainingVolumes, training_job

WINDOW = 2
#: How often a bucket gives what has come into it.
_TICK_S = 0.002
#: A live run that takes longer than this many times the simulated one has failed.
_MOST_TIMES = 20.0

SCRIPT = Script(
    "dgtp_live",
    full={"jobs": 6, "iterations": 8},
    quick={"jobs": 1, "iterations": 2},
    tables=[
        Table("Time of a placed job", "rows", {
            "job": "{job}", "flows": "{flows}", "simulated, s": "{simulated_s:.3f}",
            "live, s": "{live_s:.3f}", "live ÷ simulated": "{ratio:.3f}",
        }),
    ],
)  # fmt: skip


def drawn_job(rng: Random) -> DistributedJob:
    """Return a small training on three machines of unlike networks, of MB/s and tens of ms."""
    machines = [
        JobMachine(f"m{number}", (), rate, rate)
        for number, rate in enumerate(rng.choices((4e6, 8e6, 16e6), k=3))
    ]
    kinds = {
        role: TaskKind((), (rng.uniform(0.01, 0.06),) * 3)
        for role in (JobRole.STORE, JobRole.SAMPLER, JobRole.WORKER, JobRole.SERVER)
    }
    volumes = TrainingVolumes(rng.uniform(4e5, 8e5), 0.5, rng.uniform(4e5, 8e5), 2e5, (0.8, 1.2))
    return training_job((), machines, TrainingShape(2, 1, 1), kinds, volumes)


class Network:
    """The flows between machines, and what each may have sent by now."""

    def __init__(self, job: DistributedJob) -> None:
        self._machines = job.machines
        self._active: dict[int, ActiveFlow] = {}

    def begin(self, flow: ActiveFlow) -> None:
        """Count a flow in, which changes the rates of others."""
        self._active[flow.link] = flow
        self._share()

    def end(self, flow: ActiveFlow) -> None:
        """Count a flow out."""
        del self._active[flow.link]
        self._share()

    def _share(self) -> None:
        now_s = time.monotonic()
        flows = list(self._active.values())
        for flow, rate in zip(flows, equal(flows, self._machines), strict=True):
            flow.count(now_s)
            flow.rate = rate


class LiveJob:
    """A job that runs live, once."""

    def __init__(self, job: DistributedJob, where: Assignment, volumes: Volumes) -> None:
        self._job, self._where, self._volumes = job, where, volumes
        self._iterations = len(volumes[0])
        self._network = Network(job)
        self._changed = asyncio.Condition()
        #: By link, iterations that have arrived; by task, runs that have ended.
        self._arrived = [0] * len(job.links)
        self._ended = [0] * len(job.tasks)
        self._ready: dict[int, asyncio.Queue[int]] = {}
        self._workers = [n for n, task in enumerate(job.tasks) if task.role is JobRole.WORKER]

    async def run_s(self) -> float:
        """Return how long it takes from the first run to the last."""
        server = await asyncio.start_server(self._receive, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        crossing = [
            n for n, link in enumerate(self._job.links) if self._job.crosses(link, self._where)
        ]
        connections = [await asyncio.open_connection(*address[:2]) for _ in crossing]
        async with server:
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number, (_, writer) in zip(crossing, connections, strict=True):
                    self._ready[number] = asyncio.Queue()
                    group.create_task(self._send(number, writer))
                for task in range(len(self._job.tasks)):
                    group.create_task(self._repeat(task))
            took_s = time.monotonic() - began_s
            for _, writer in connections:
                writer.close()
                await writer.wait_closed()
        return took_s

    async def _repeat(self, task: int) -> None:
        """Run a task as often as it has to, each time when all is there."""
        run_s = self._job.tasks[task].run_s[self._where[task]]
        for iteration in range(self._iterations):
            async with self._changed:
                await self._changed.wait_for(partial(self._may_run, task, iteration))
            await asyncio.sleep(run_s)
            async with self._changed:
                self._ended[task] += 1
                for number in self._job.outgoing[task]:
                    if iteration + self._job.links[number].shift >= self._iterations:
                        continue
                    if number in self._ready:
                        self._ready[number].put_nowait(iteration)
                    else:
                        self._arrived[number] += 1
                self._changed.notify_all()

    def _may_run(self, task: int, iteration: int) -> bool:
        job = self._job
        waits = job.tasks[task].role is JobRole.STORE and iteration >= WINDOW
        if waits and any(self._ended[one] <= iteration - WINDOW for one in self._workers):
            return False
        return all(
            self._arrived[number] > iteration - job.links[number].shift
            for number in job.incoming[task]
        )

    def _is_there(self, number: int, iteration: int) -> bool:
        return self._arrived[number] > iteration

    def _sent_count(self, link: JobLink) -> int:
        return max(0, self._iterations - link.shift)

    async def _send(self, number: int, writer: asyncio.StreamWriter) -> None:
        """Send what a link has to, one iteration after the other, as the bucket allows."""
        link = self._job.links[number]
        writer.write(number.to_bytes(4, "big"))
        for _ in range(self._sent_count(link)):
            iteration = await self._ready[number].get()
            whole = float(self._bytes(number, iteration))
            now_s = time.monotonic()
            flow = ActiveFlow(
                number, iteration, self._where[link.source], self._where[link.target],
                (link.target, iteration + link.shift), whole, (now_s, number), now_s, now_s,
            )  # fmt: skip
            self._network.begin(flow)
            written = 0
            while written < whole:
                flow.count(time.monotonic())
                allowed = int(whole - flow.left_bytes)
                if allowed > written:
                    writer.write(bytes(allowed - written))
                    await writer.drain()
                    written = allowed
                if written < whole:
                    await asyncio.sleep(min(_TICK_S, flow.left_bytes / flow.rate))
            async with self._changed:
                await self._changed.wait_for(partial(self._is_there, number, iteration))
            self._network.end(flow)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Count what comes over one connection."""
        number = int.from_bytes(await reader.readexactly(4), "big")
        for iteration in range(self._sent_count(self._job.links[number])):
            left = self._bytes(number, iteration)
            while left:
                got = len(await reader.read(left))
                if not got:
                    raise ConnectionError(f"link {number} ended in iteration {iteration}")
                left -= got
            async with self._changed:
                self._arrived[number] += 1
                self._changed.notify_all()
        writer.close()

    def _bytes(self, number: int, iteration: int) -> int:
        return round(self._volumes[number][iteration])


def compared(number: int, iterations: int) -> dict[str, Any]:
    """Return the times of one job, live and simulated."""
    rng = Random(f"live {number}")
    job = drawn_job(rng)
    where = job.assigned({task: rng.randrange(3) for task in job.movable})
    volumes = drawn_volumes(job, iterations, rng)
    simulated = played(job, where, volumes, window=WINDOW)

    async def live() -> float:
        async with asyncio.timeout(max(30.0, _MOST_TIMES * simulated.makespan_s)):
            return await LiveJob(job, where, volumes).run_s()

    live_s = asyncio.run(live())
    return {
        "job": number, "flows": len(simulated.flows), "simulated_s": simulated.makespan_s,
        "live_s": live_s, "ratio": live_s / simulated.makespan_s,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each job."""
    return {"rows": [compared(number, options.iterations) for number in range(options.jobs)]}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
