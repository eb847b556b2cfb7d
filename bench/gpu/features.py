"""Measure requests by node id: ways to get features to the GPU, and what overlap gains.

    python -m bench.gpu.features [--quick] [--dry]

PyTorch-Direct's Figures 11 and 12 as the latency of a request: ids and edges of a sample of 8,192
nodes go up, their features come from a table in host memory, a GCN of three layers runs, the answer
comes down. Rows are 128 to 4,096 bytes wide. Ways to get the features:

- host: the host gathers the rows, and they are copied;
- naive: the device reads each row in place from its beginning;
- shifted: it begins at a line of the bus, as lanes do;
- hot: shifted, with the tenth of the rows that half of the ids ask for on the device;
- device: all rows are on the device, which no way can beat.

Overlap: the gather takes `share` of a request, the most that hiding it can save. `ahead` gathers
the next request on a stream of its own beside the run before it, inside one lane; `lanes_2` and
`lanes_4` do whole requests side by side, as the server does. Requests a second ÷ those of one lane.
Overlap inside a lane is worth building where it gains 1.05 times and more than four lanes do.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.kit import Result, Rig, graph, relative_error, run, spread
from bench.gpu.lanes import Lane, at_once, task_in
from serve.lane.cuda.cuda_queue import CudaQueue
from serve.lane.cuda.queues import Queue

ROW_BYTES = (128, 512, 1024, 2048, 4096)
WAYS = ("host", "naive", "shifted", "hot", "device")
NODES, DEGREE, CLASSES = 8192, 10, 16
LIMIT_BYTES = 2 << 30
#: Answers of all ways are those of the same features.
LIMIT = 1e-5
WORTH = 1.05


class Request:
    """A request by node id, to be repeated, and the table that it is about."""

    def __init__(self, rig: Rig, row_bytes: int, table_bytes: int) -> None:
        self.rig, features = rig, row_bytes // 4
        nodes = 256 if rig.dry else NODES
        rows = table_bytes // row_bytes
        generator = torch.Generator().manual_seed(row_bytes)
        # As resident graphs have it: memory of their own, registered.
        self.table = torch.rand(rows, features, generator=generator)
        self.seen = self.table.data_ptr()
        if rig.library is not None:
            self.seen = rig.library.register(self.table.data_ptr(), self.table.nbytes)
        self.ids = torch.randint(rows, (nodes,), generator=generator)
        self.ids[::2] = torch.randint(rows // 10, (len(self.ids[::2]),), generator=generator)
        self.edges = graph(nodes, DEGREE * nodes, 1)["edge_index"]
        self.staging = torch.empty(nodes, features)
        self.place = torch.empty(nodes, CLASSES)
        if not rig.dry:
            self.ids, self.edges = self.ids.pin_memory(), self.edges.pin_memory()
            self.staging, self.place = self.staging.pin_memory(), self.place.pin_memory()
        self.on_device = self.table.to(rig.device)
        self.slot_of = torch.full((rows,), -1, dtype=torch.int32, device=rig.device)
        self.slot_of[: rows // 10] = torch.arange(rows // 10, dtype=torch.int32, device=rig.device)
        self.model = rig.model("gcn", features, CLASSES, 64, 3)

    def close(self) -> None:
        """Unpin the table."""
        if self.rig.library is not None:
            self.rig.library.unregister(self.table.data_ptr())

    def fetch(self, way: str, queue: Queue, ids: torch.Tensor, x: torch.Tensor) -> None:
        """Get the features of the nodes to `x`, for what the queue runs next."""
        library = self.rig.library
        if way == "host":
            torch.index_select(self.table, 0, self.ids, out=self.staging)
            queue.fill([(self.staging, x)])
        elif way == "device" or library is None:
            torch.index_select(self.on_device, 0, ids, out=x)
        else:
            hot = way == "hot"
            library.gather(
                self.seen, ids.data_ptr(), len(ids), x.shape[1] * 4, x.data_ptr(),
                stream=stream_of(queue), shift=way != "naive",
                hot=self.on_device.data_ptr() if hot else 0,
                slot_of=self.slot_of.data_ptr() if hot else 0,
            )  # fmt: skip

    def begin(self, queue: Queue) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return ids and edges on the device, and a place for features."""
        placed = queue.upload({"ids": self.ids, "edge_index": self.edges})
        return placed, torch.empty_like(self.staging, device=queue.device)

    def once(self, lane: Lane, way: str, place: torch.Tensor) -> None:
        """Answer to `place`; in the lane's thread."""
        queue = lane.queue
        with task_in(lane.memory, LIMIT_BYTES), torch.inference_mode(), queue.running():
            placed, x = self.begin(queue)
            self.fetch(way, queue, placed["ids"], x)
            output = self.model(x, placed["edge_index"]).contiguous()
            queue.download([(output, place)])
            del placed, x, output

    def gathers(self, lane: Lane) -> None:
        """Do all but the run and the download."""
        queue = lane.queue
        with task_in(lane.memory, LIMIT_BYTES), torch.inference_mode(), queue.running():
            placed, x = self.begin(queue)
            self.fetch("shifted", queue, placed["ids"], x)
            queue.finish()
            del placed, x

    def repeated(self, lane: Lane, count: int) -> None:
        """Answer so many times, to a place of the lane's own."""
        place = torch.empty_like(self.place, pin_memory=not self.rig.dry)
        for _ in range(count):
            self.once(lane, "shifted", place)

    def ahead(self, lane: Lane, beside: Queue, count: int) -> None:
        """Answer so many times; `beside` gathers for the next meanwhile. In the lane's thread.

        Both places are taken before the first run: memory that a run has freed may still be read by
        it, and is safe to take on its own stream only.
        """
        queue = lane.queue
        with task_in(lane.memory, LIMIT_BYTES), torch.inference_mode():
            with queue.running():
                placed, first = self.begin(queue)
                places = [first, torch.empty_like(first)]
                self.fetch("shifted", queue, placed["ids"], first)
                queue.finish()
            for number in range(count):
                with queue.running():
                    output = self.model(places[number % 2], placed["edge_index"]).contiguous()
                with beside.running():
                    self.fetch("shifted", beside, placed["ids"], places[(number + 1) % 2])
                with queue.running():
                    queue.download([(output, self.place)])
                with beside.running():
                    beside.finish()
            del placed, first, places, output


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(32 << 30, dry=arguments.dry)
    small = arguments.quick or arguments.dry
    table_bytes = (16 << 20) if arguments.dry else (256 << 20) if small else (2 << 30)
    beside = rig.queue()
    rows: list[dict[str, Any]] = []
    for row_bytes in ROW_BYTES[::4] if small else ROW_BYTES:
        with result.part(f"rows of {row_bytes} bytes"):
            request = Request(rig, row_bytes, table_bytes)
            try:
                found = {
                    "row_bytes": row_bytes,
                    **latencies(result, request, beside, 3 if small else 15),
                }
                rows.append(found | overlap(request, beside, 5 if small else 40, 3))
            finally:
                rig.synchronize()
                request.close()
            result.put("rows", rows)
    if rows:
        gains = {row["row_bytes"]: row["overlap"] for row in rows}
        worth = [width for width, gain in gains.items() if is_worth(gain)]
        result.put("overlap_inside_a_lane_is_worth_it_for_rows_of", worth)


def latencies(result: Result, request: Request, beside: Queue, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a request by way, after a check of its answers."""
    (lane,) = request.rig.lanes(1)
    answers = {}
    for way in WAYS:
        request.place.zero_()
        lane.call(request.once, lane, way, request.place)
        answers[way] = request.place.clone()
    request.place.zero_()
    lane.call(request.ahead, lane, beside, 3)
    answers["ahead"] = request.place
    worst = max(relative_error(answer, answers["host"]) for answer in answers.values())
    result.check(f"answers by all ways are alike to {LIMIT}", worst <= LIMIT, worst)

    def work(way: str) -> Callable[[], object]:
        return partial(lane.call, request.once, lane, way, request.place)

    found = request.rig.in_turns_ms({way: work(way) for way in WAYS}, rounds)
    return {"ms": {way: spread(times) for way, times in found.items()}}


def overlap(request: Request, beside: Queue, count: int, rounds: int) -> dict[str, Any]:
    """Return the gather's share of a request, and the gain of each way to hide it."""
    lanes = request.rig.lanes(4)

    def on(some: list[Lane], each: int) -> Callable[[], object]:
        return lambda: at_once((lane, partial(request.repeated, lane, each)) for lane in some)

    first = lanes[0]
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "gather": (count, lambda: [first.call(request.gathers, first) for _ in range(count)]),
        "ahead": (count, lambda: first.call(request.ahead, first, beside, count)),
        "lanes_1": (count, on(lanes[:1], count)),
        "lanes_2": (2 * count, on(lanes[:2], count)),
        "lanes_4": (4 * count, on(lanes, count)),
    }
    times = request.rig.in_turns_ms({name: work for name, (_, work) in ways.items()}, rounds)
    each_ms = {name: min(times[name]) / done for name, (done, _) in ways.items()}
    alone = each_ms["lanes_1"]
    gains = {name: round(alone / each_ms[name], 3) for name in ("ahead", "lanes_2", "lanes_4")}
    return {"share": round(each_ms["gather"] / alone, 3), "overlap": gains}


def stream_of(queue: Queue) -> int:
    """Return CUDA's handle of the stream in use."""
    assert isinstance(queue, CudaQueue)
    return queue.stream


def is_worth(gain: dict[str, float]) -> bool:
    """Return True where gathering ahead inside a lane gains what lanes do not."""
    return gain["ahead"] >= WORTH and gain["ahead"] > gain["lanes_4"]


if __name__ == "__main__":
    run("features", __doc__, body)
