"""Check the arena under torch: exact peaks, overruns that harm one task only, no later cudaMalloc.

python -m tests.gpu.arena [--quick] [--dry]
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.gpu.kit import MODELS, Result, Rig, graph, run
from bench.gpu.lanes import first_products

GIB = 1 << 30
_cuda: Any = torch.cuda


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(8 * GIB, dry=arguments.dry)
    if rig.arena is None:
        result.check("dry run ends here", True)
        return
    backend = torch.cuda.memory.get_allocator_backend()
    result.check("torch allocates from the arena", backend == "pluggable", backend)
    lane, other = rig.arena.add_lane(), rig.arena.add_lane()
    queue = rig.queue()

    with result.part("static memory of a first matrix product"):
        before = rig.arena.static_bytes
        with queue.running():
            first_products(rig.device)
            queue.finish()
        result.put("static_bytes_of_a_first_product", rig.arena.static_bytes - before)

    with result.part("an overrun"):
        lane.insert(1 << 20)
        kind = ""
        with queue.running():
            try:
                torch.empty(2 << 20, dtype=torch.uint8, device=rig.device)
            except BaseException as error:
                kind = f"{type(error).__name__}: {error}"
        result.check("an overrun raises RuntimeError or MemoryError", bool(kind), kind)
        result.check("its size is told", lane.refused_bytes() == 2 << 20, lane.refused_bytes())
        with queue.running():
            small = torch.ones(1000, device=rig.device)
            result.check("the next allocation works", float(small.sum()) == 1000.0)
            del small
            queue.finish()
        result.check("the lane is empty", lane.clear() == 0)

    with result.part("two threads"):
        failures: list[str] = []

        def use(memory: Any, limit: int, shall_fail: bool) -> None:
            mine = rig.queue()
            for _ in range(50):
                memory.insert(limit)
                failed = False
                try:
                    with mine.running():
                        torch.ones(1 << 20, device=rig.device).sum()
                except (RuntimeError, MemoryError):
                    failed = True
                mine.finish()
                if memory.clear() or failed != shall_fail:
                    failures.append(f"failed {failed}, should {shall_fail}")

        with ThreadPoolExecutor(2) as threads:
            futures = [
                threads.submit(use, lane, 1 << 20, True),
                threads.submit(use, other, 16 << 20, False),
            ]
        for future in futures:
            future.result()
        result.check("one lane overruns 50 times, its neighbour never", not failures, failures[:3])

    with result.part("peaks"):
        rows = []
        for name in MODELS:
            model = rig.model(name, 128, 16, 256, 8)
            inputs = graph(4000, 40_000, 128)
            peaks = set()
            for attempt in range(4):
                lane.insert(4 * GIB)
                with queue.running(), torch.inference_mode():
                    placed = queue.upload(inputs)
                    output = model(placed["x"], placed["edge_index"])
                    queue.finish()
                    del output, placed
                live, held = lane.live_bytes(), lane.held_peak_bytes()
                if attempt:
                    peaks.add((lane.peak_bytes(), held, lane.spills()))
                left = lane.clear()
                result.check(f"{name} leaves nothing behind", live == left == 0, [live, left])
            rows.append({"model": name, "peaks_of_three_runs": sorted(peaks)})
        result.put("peaks", rows)

    with result.part("steady state"):
        model = rig.model("gcn", 64, 8, 64, 3)
        inputs = graph(500, 3000, 64)
        count = 200 if arguments.quick else 1000

        def task() -> None:
            lane.insert(256 << 20)
            with queue.running(), torch.inference_mode():
                placed = queue.upload(inputs)
                place = torch.empty(500, 8)
                queue.download([(model(placed["x"], placed["edge_index"]), place)])
                del placed
            lane.clear()

        for _ in range(3):
            task()
        free, held = _cuda.mem_get_info()[0], rig.arena.held_bytes
        for _ in range(count):
            task()
        taken = [free - _cuda.mem_get_info()[0], rig.arena.held_bytes - held]
        result.aim(3, taken == [0, 0], f"{taken} bytes more after {count} tasks")


if __name__ == "__main__":
    run("arena", __doc__, body)
