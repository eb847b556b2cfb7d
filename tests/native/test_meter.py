"""The memory meter in processes it is preloaded into, against what PyTorch says it allocated."""

import pytest

from serve import native
from tests.metered import metered_forks


@pytest.fixture(scope="module")
def run_metered():
    """Run a script in a process with the meter and torch; what it prints as JSON."""
    with metered_forks() as run:
        yield run


def test_a_process_without_the_library_has_no_meter():
    assert native.Meter.attach() is None


def test_known_tensors_exactly(run_metered):
    seen = run_metered("""
        import json, torch
        from serve.native import Meter
        meter = Meter.attach()
        seen = []
        def note():
            seen.append([meter.live_bytes() - base, meter.peak_bytes() - base])
        base = meter.live_bytes()
        meter.reset()
        a = torch.empty(1000)
        b = torch.empty(17, 3, dtype=torch.int64)
        note()
        del a
        note()
        meter.reset()
        note()
        c = (b.float() + 1).double()  # both steps live at once, then one
        note()
        print(json.dumps(seen + [meter.untracked_blocks()]))
    """)
    a, b = 4000, 17 * 3 * 8
    floats, doubles = 17 * 3 * 4, 17 * 3 * 8
    assert seen == [
        [a + b, a + b],
        [b, a + b],
        [b, b],
        [b + doubles, b + floats + max(floats, doubles)],
        0,
    ]


def test_a_forked_child_measures_its_own_copy(run_metered):
    seen = run_metered("""
        import json, os, torch
        from serve.native import Meter
        meter = Meter.attach()
        inherited = torch.empty(1000)
        base = meter.live_bytes()
        read, write = os.pipe()
        if os.fork() == 0:
            meter.reset()
            own = torch.empty(500)
            del inherited, own
            counts = [meter.peak_bytes() - base, meter.live_bytes() - base]
            os.write(write, json.dumps(counts).encode())
            os._exit(0)
        os.wait()
        print(json.dumps([json.loads(os.read(read, 100)), meter.live_bytes() - base]))
    """)
    assert seen == [[2000, -4000], 0]


def test_threads_are_counted_together(run_metered):
    seen = run_metered("""
        import json, threading, torch
        from serve.native import Meter
        meter = Meter.attach()
        base = meter.live_bytes()
        meter.reset()
        kept = [None] * 4
        barrier = threading.Barrier(4)
        def work(i):
            for _ in range(200):
                torch.empty(300)
            barrier.wait()
            kept[i] = torch.empty(10_000)
            barrier.wait()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(json.dumps([meter.live_bytes() - base, meter.peak_bytes() - base]))
    """)
    assert seen == [160_000, 160_000]


def test_a_tensor_beyond_the_limit_is_an_ordinary_error(run_metered):
    seen = run_metered("""
        import json, torch
        from serve.native import Meter
        meter = Meter.attach()
        kept = torch.ones(50_000)
        meter.insert(400_000)
        first = torch.ones(50_000)
        try:
            torch.ones(60_000)
        except RuntimeError as error:
            said = str(error)
        refused = meter.refused_bytes()
        second = torch.ones(50_000)
        peak = meter.held_peak_bytes()
        meter.clear()
        torch.ones(1_000_000)
        meter.insert(100)
        print(json.dumps([refused, peak, meter.refused_bytes(), "allocate memory" in said]))
    """)
    assert seen == [240_000, 400_000, 0, True]


def test_a_word_in_shared_memory_ends_the_work(run_metered):
    seen = run_metered("""
        import ctypes, json, torch
        from serve.native import Meter
        meter = Meter.attach()
        word = ctypes.c_uint64(6)
        meter.insert(1 << 30)
        meter.stop_when(ctypes.addressof(word), 7)
        kept = torch.ones(1000)
        word.value = 7
        try:
            torch.ones(1000)
        except RuntimeError as error:
            said = str(error)
        meter.clear()
        torch.ones(1000)
        print(json.dumps("allocate memory" in said))
    """)
    assert seen


def test_what_a_kernel_takes_by_itself_is_held(run_metered):
    held, tensors = run_metered("""
        import json, torch
        from serve.native import Meter
        torch.set_num_threads(1)
        meter = Meter.attach()
        index = torch.randint(2000, (20_000, 1)).expand(-1, 64)
        messages = torch.randn(20_000, 64)
        base = meter.live_bytes()
        meter.insert(1 << 30)
        torch.zeros(2000, 64).scatter_add_(0, index, messages)
        print(json.dumps([meter.held_peak_bytes(), meter.peak_bytes() - base]))
    """)
    assert tensors == 2000 * 64 * 4
    assert held == tensors + 32 * 20_000, "PyTorch sorts the index: 32 bytes an edge"


@pytest.mark.parametrize("kind", ["GCNConv", "SAGEConv"])
def test_the_peak_of_a_forward_pass_is_the_profilers(run_metered, kind):
    measured, profiled = run_metered(f"""
        import json, torch
        from torch.profiler import ProfilerActivity, profile
        from torch_geometric.nn import {kind} as Conv
        from serve.native import Meter
        torch.manual_seed(0)
        torch.set_num_threads(1)
        layers = torch.nn.ModuleList([Conv(32, 64), Conv(64, 64), Conv(64, 8)]).eval()
        x, edges = torch.randn(800, 32), torch.randint(800, (2, 5000))
        @torch.inference_mode()
        def forward():
            h = x
            for layer in layers:
                h = layer(h, edges).relu()
            return h
        forward()
        meter = Meter.attach()
        base = meter.live_bytes()
        meter.reset()
        forward()
        measured = meter.peak_bytes() - base
        # The profiler, too, is asked for every allocation and release, in order.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            forward()
        live = peak = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        print(json.dumps([measured, peak]))
    """)
    assert profiled > 800 * 64 * 4
    # Blocks under 64 bytes are not worth a place in the table.
    assert profiled - 1000 <= measured <= profiled
