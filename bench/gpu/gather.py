"""Measure gathering of features in place: rows of pinned host memory over the bus.

    python -m bench.gpu.gather [--quick] [--dry]

Bandwidth in GB/s of rows wanted, each repeated five times in turn with the others:

- copy: one cudaMemcpy of as many bytes from pinned memory, the upper bound of the bus;
- naive: random rows, each read from its beginning;
- kernel: random rows, read from the first line of the bus in them;
- hot: the kernel with a tenth of the rows, which half of the wanted ones hit, cached on the GPU.

Rows of 128 bytes to 4 KiB, from tables that begin at a cache line and 4 bytes behind one, and the
rows of PyTorch-Direct's Figure 8, 1,024 to 1,044 bytes. There the paper has `naive` at 0.78 to 0.82
and `kernel` at 0.88 to 0.93 of `copy`. Every answer is compared with the host's bit by bit. The aim
is 0.93 of `copy`.

Its Figure 10: how fast a gather is by its threads, the fewest that lanes would take
(``serve.lane.cuda.gather_threads``), and what a large model's run takes beside a gather by these,
and by the most, ÷ alone. That is what taking the fewest is worth.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.kit import Result, Rig, graph, run, spread
from serve.lane.cuda.cuda_queue import Pinned, parts_of
from serve.lane.cuda.gather_threads import THREADS, fewest_threads

ROW_BYTES = (128, 256, 400, 480, 512, 1024, 2000, 2408, 4096)
FIGURE_8 = range(1028, 1045, 4)
AIM = 0.93
#: Threads that a multiprocessor holds at once.
PER_SM = 2048
_cuda: Any = torch.cuda


def pinning(pinned: Pinned, memory: torch.Tensor) -> dict[str, Any]:
    """Pin the memory in one piece and then in parts; return what both took, in seconds."""
    address, size_bytes = memory.data_ptr(), memory.nbytes
    found: dict[str, Any] = {"parts": len(list(parts_of(address, size_bytes)))}
    ways: dict[str, Callable[[int, int], object]] = {
        "in one": pinned.register,
        "in parts": pinned.register_in_parts,
    }
    for way, register in ways.items():
        started = time.monotonic()
        register(address, size_bytes)
        between = time.monotonic()
        found[f"{way}, s"] = round(between - started, 3)
        if way == "in one":
            pinned.unregister(address)
            found["given back, s"] = round(time.monotonic() - between, 3)
    return found


def body(result: Result, arguments: argparse.Namespace) -> None:
    if arguments.dry:
        result.check("dry run ends here", True)
        return
    rig = Rig.open(24 << 30, dry=False)
    library = rig.library
    assert library is not None
    table_bytes = (1 if arguments.quick else 8) << 30
    wanted_bytes = (256 if arguments.quick else 1024) << 20
    # Anonymous memory, registered as the server registers resident graphs.
    memory = torch.empty(table_bytes + 4096, dtype=torch.uint8)
    torch.arange(memory.numel() // 8, out=memory.view(torch.int64))
    pinned_memory = Pinned(library)
    with result.part("pinned in parts"):
        result.put("pinning", pinning(pinned_memory, memory))
    seen = pinned_memory.seen(memory)
    if seen is None:
        seen = library.register(memory.data_ptr(), memory.numel())
    pinned = torch.empty(wanted_bytes + 4096, dtype=torch.uint8, pin_memory=True)
    out = torch.empty(wanted_bytes + 4096, dtype=torch.uint8, device=rig.device)
    stream = _cuda.Stream(rig.device)
    rows_found: list[dict[str, Any]] = []
    threads = tune(result, rig, seen, memory.data_ptr(), out, stream, table_bytes, wanted_bytes)
    with result.part("a large model beside a gather"):
        base, count = seen + (-memory.data_ptr()) % 128, wanted_bytes // 1024
        ids = torch.randint((table_bytes - 256) // 1024, (count,)).to(rig.device)

        def gather(most_threads: int) -> None:
            library.gather(
                base, ids.data_ptr(), count, 1024, out.data_ptr(),
                stream=stream.cuda_stream, most_threads=most_threads,
            )  # fmt: skip

        result.put("run_beside_gather", beside(rig, gather, (threads, max(THREADS))))

    def measure(row_bytes: int, offset: int) -> None:
        base = (-memory.data_ptr()) % 128 + offset
        count, num_rows = wanted_bytes // row_bytes, (table_bytes - 256) // row_bytes
        generator = torch.Generator().manual_seed(row_bytes)
        ids_host = torch.randint(num_rows, (count,), generator=generator)
        hot_rows = min(num_rows // 10, (2 << 30) // row_bytes)
        half = ids_host.clone()
        half[::2] = torch.randint(hot_rows, ((count + 1) // 2,), generator=generator)
        table = memory[base : base + num_rows * row_bytes].view(num_rows, row_bytes)
        ids, half_ids = ids_host.to(rig.device), half.to(rig.device)
        slots = torch.full((num_rows,), -1, dtype=torch.int32, device=rig.device)
        slots[:hot_rows] = torch.arange(hot_rows, dtype=torch.int32, device=rig.device)
        # As far past a line as the table, so that the rows of both are aligned alike.
        cache = torch.empty(hot_rows * row_bytes + 256, dtype=torch.uint8, device=rig.device)
        hot = cache[offset : offset + hot_rows * row_bytes].view(hot_rows, row_bytes)
        hot.copy_(table[:hot_rows])
        target = out[: count * row_bytes].view(count, row_bytes)
        staging = pinned[: count * row_bytes].view(count, row_bytes)

        def kernel(wanted: torch.Tensor, cached: bool, shift: bool = True) -> None:
            library.gather(
                seen + base, wanted.data_ptr(), count, row_bytes, target.data_ptr(),
                stream=stream.cuda_stream, most_threads=threads, shift=shift,
                hot=hot.data_ptr() if cached else 0,
                slot_of=slots.data_ptr() if cached else 0,
            )  # fmt: skip

        def copy() -> None:
            with _cuda.stream(stream):
                target.copy_(staging, non_blocking=True)

        variants: dict[str, Callable[[], None]] = {
            "copy": copy,
            "naive": lambda: kernel(ids, False, shift=False),
            "kernel": lambda: kernel(ids, False),
            "hot": lambda: kernel(half_ids, True),
        }
        for name, wanted in (("naive", ids_host), ("kernel", ids_host), ("hot", half)):
            target.zero_()
            rig.synchronize()
            variants[name]()
            rig.synchronize()
            right = torch.equal(target[:4096].cpu(), table[wanted[:4096]])
            right = right and torch.equal(target[-4096:].cpu(), table[wanted[-4096:]])
            result.check(f"{name}: rows of {row_bytes} B at {offset} are right", right)
        megabytes = count * row_bytes / 1e6
        speed = {
            name: spread([megabytes / ms for ms in found], 2)
            for name, found in rig.in_turns_ms(variants, 5).items()
        }
        to_copy = {
            name: round(speed[name]["median"] / speed["copy"]["median"], 3)
            for name in ("naive", "kernel")
        }
        share = to_copy["kernel"]
        row = {"row_bytes": row_bytes, "offset": offset, "gb_per_s": speed, "to_copy": to_copy}
        rows_found.append(row)
        result.put("rows", rows_found)
        if row_bytes in ROW_BYTES:
            result.aim(11, share >= AIM, {f"{row_bytes} B, {offset} past a line": share})

    for row_bytes in ROW_BYTES[::4] if arguments.quick else ROW_BYTES:
        for offset in (0, 4):
            with result.part(f"rows of {row_bytes} bytes, {offset} past a line"):
                measure(row_bytes, offset)
    for row_bytes in FIGURE_8[::2] if arguments.quick else FIGURE_8:
        with result.part(f"Figure 8, rows of {row_bytes} bytes"):
            measure(row_bytes, 0)
    library.unregister(memory.data_ptr())


def tune(
    result: Result, rig: Rig, seen: int, start: int, out: torch.Tensor, stream: Any,
    table_bytes: int, wanted_bytes: int,
) -> int:  # fmt: skip
    """Return what lanes would take: the fewest threads that are nearly as fast as the best."""
    row_bytes, count = 1024, wanted_bytes // 1024
    base = (-start) % 128
    ids = torch.randint((table_bytes - 256) // row_bytes, (count,)).to(rig.device)
    library = rig.library
    assert library is not None
    seconds = {}
    for most in THREADS:

        def work(threads: int = most) -> None:
            library.gather(
                seen + base, ids.data_ptr(), count, row_bytes, out.data_ptr(),
                stream=stream.cuda_stream, most_threads=threads,
            )  # fmt: skip

        seconds[most] = min(rig.time_s(work, 3))
    speeds = {str(n): round(count * row_bytes / 1e9 / s, 2) for n, s in seconds.items()}
    result.put("gb_per_s_by_threads", speeds)
    found = fewest_threads(seconds)
    processors = _cuda.get_device_properties(rig.device).multi_processor_count
    result.put("threads_taken", {"threads": found, "of_device": found / (processors * PER_SM)})
    return found


def beside(
    rig: Rig, gather: Callable[[int], None], grids: tuple[int, ...]
) -> dict[str, dict[str, Any]]:
    """Return the time of a large model's run beside a gather ÷ alone, by the gather's threads."""
    work = graph(20_000, 200_000, 128)
    inputs = {name: tensor.to(rig.device) for name, tensor in work.items()}
    model = rig.model("gcn", 128, 16, 256, 8)
    other = _cuda.Stream(rig.device)

    def run_ms(threads: int) -> float:
        begun, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        rig.synchronize()
        if threads:
            gather(threads)
        with torch.inference_mode(), _cuda.stream(other):
            begun.record()
            model(inputs["x"], inputs["edge_index"])
            ended.record()
        rig.synchronize()
        return float(begun.elapsed_time(ended))

    times: dict[int, list[float]] = {threads: [] for threads in (0, *grids)}
    for number in range(6):
        for threads, found in times.items():
            taken_ms = run_ms(threads)
            if number:  # the first is cold
                found.append(taken_ms)
    alone = min(times[0])
    return {
        str(threads): spread([taken_ms / alone for taken_ms in found])
        for threads, found in times.items()
    }


if __name__ == "__main__":
    run("gather", __doc__, body)
