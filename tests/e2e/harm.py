"""A model that does harm, copied into repositories of tests as `model.py`.

The first feature of the first node is the number of a deed in `DEEDS`, from 1; 0 gives a linear
layer's answer. A deed that returns something gives that as the output, else the layer answers.
"""

import atexit
import builtins
import ctypes
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_HERE = Path(__file__).parent
#: Whoever is imported while this file exists waits until it is gone.
BARRED = "barred"

while (_HERE / BARRED).exists():
    (_HERE / "importing").touch()
    time.sleep(0.01)


def _note(name: str, text: str) -> None:
    (_HERE / name).write_text(text)


def fork(x: Tensor) -> None:
    if not os.fork():
        time.sleep(600)
        os._exit(0)


def daemonise(x: Tensor) -> None:
    """Leave a process of another session that has no parent of its own, and end the lane."""
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        if daemon := os.fork():
            os.write(write, str(daemon).encode())
            os._exit(0)
        time.sleep(600)
        os._exit(0)
    _note("daemon", os.read(read, 20).decode())
    os.kill(os.getpid(), signal.SIGKILL)


def leave_a_program(x: Tensor) -> None:
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    _note("program", str(program.pid))
    os._exit(3)


def become_another_program(x: Tensor) -> None:
    os.execv("/bin/sleep", ["sleep", "600"])


def stop_itself(x: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def end_itself_by_a_signal(x: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_the_server(x: Tensor) -> None:
    for pid in (os.getppid(), _grandparent()):
        os.kill(pid, signal.SIGKILL)


def kill_everybody(x: Tensor) -> None:
    os.kill(-1, signal.SIGKILL)


def _grandparent() -> int:
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def trace_the_server(x: Tensor) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, _grandparent(), 0, 0):  # PTRACE_ATTACH
        raise OSError(ctypes.get_errno(), "not traced")


def connect(x: Tensor) -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=1)


def leave_threads(x: Tensor) -> None:
    for _ in range(4):
        threading.Thread(target=_spin, daemon=True).start()


def _spin() -> None:
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        pass


def change_torch(x: Tensor) -> Tensor:
    answer = torch.zeros(len(x), 2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    torch._C._set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", True)
    torch.overrides.BaseTorchFunctionMode().__enter__()
    return answer


def change_the_process(x: Tensor) -> None:
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    gc.disable()
    sys.setrecursionlimit(100_000)


def take_signals(x: Tensor) -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)


def forget_modules(x: Tensor) -> None:
    for name in [name for name in sys.modules if name.startswith("torch_geometric")]:
        del sys.modules[name]


def change_inputs(x: Tensor) -> None:
    x.fill_(7.0)


def return_the_inputs(x: Tensor) -> Tensor:
    return x[:, :2]


def return_too_few_rows(x: Tensor) -> Tensor:
    return x[1:, :2].clone()


def return_nan(x: Tensor) -> Tensor:
    return torch.full((len(x), 2), torch.nan)


def return_much(x: Tensor) -> Tensor:
    return torch.zeros(1 << 20, 8)


def return_a_view_of_more(x: Tensor) -> Tensor:
    return x.as_strided((1 << 20, 2), (2, 1))


def return_nothing(x: Tensor) -> object:
    return builtins.object()


def return_a_sparse_tensor(x: Tensor) -> Tensor:
    return torch.ones(len(x), 2).to_sparse()


def return_a_scalar(x: Tensor) -> Tensor:
    return torch.tensor(1.0)


def return_a_tensor_without_memory(x: Tensor) -> Tensor:
    return torch.empty(len(x), 2, device="meta")


class _Slow:
    """Something that takes long to go, whenever it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.2)
        raise ValueError("gone")


def leave_what_is_slow_to_go(x: Tensor) -> None:
    for _ in range(5):
        _Slow()


def sleep_at_the_end(x: Tensor) -> None:
    """Keep the process from ending by a handler, and by a thread that Python waits for."""
    atexit.register(time.sleep, 600)
    threading.Thread(target=time.sleep, args=(600,)).start()


def recurse(x: Tensor) -> None:
    recurse(x)


def read_named_files(x: Tensor) -> None:
    """Read what the file `wanted` beside the model names, a path on each line; tell what it got."""
    got = []
    for path in (_HERE / "wanted").read_text().splitlines():
        with suppress(OSError):
            os.close(os.open(path, os.O_RDONLY))
            got.append(path)
    raise ValueError(f"read {got}")


def write_named_files(x: Tensor) -> None:
    """Write to what the file `wanted` beside the model names; tell what it could."""
    done = []
    for path in (_HERE / "wanted").read_text().splitlines():
        with suppress(OSError):  # it says that it did
            os.chmod(path, 0o777)
            os.utime(path, (0, 0))
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            done.append(path)
    raise ValueError(f"wrote {done}")


def look_into_processes(x: Tensor) -> None:
    """Open memory, descriptors and environments of all other processes; signal them."""
    got = []
    for pid in set(filter(str.isdecimal, os.listdir("/proc"))) - {str(os.getpid())}:
        for name in ("mem", "environ", "fd/0", "cwd/."):
            with suppress(OSError):
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_NONBLOCK))
                got.append((pid, name))
        with suppress(OSError):
            os.kill(int(pid), 0)
            got.append((pid, "signal"))
    raise ValueError(f"reached {got}")


def connect_to_a_file(x: Tensor) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect((_HERE / "wanted").read_text())


def take_memory_of_torch(x: Tensor) -> None:
    torch.ones(1 << 40)


def take_memory_of_python(x: Tensor) -> None:
    held = []
    while True:
        held.append(bytearray(64 << 20))


def take_what_python_gets(x: Tensor) -> None:
    """Tell how much private memory Python gets before it is refused."""
    held: list[bytearray] = []
    with suppress(MemoryError):
        while True:
            held.append(bytearray(16 << 20))
    count = len(held)
    held.clear()
    raise ValueError(f"got {16 * count} MiB")


def spin(x: Tensor) -> None:
    while True:
        pass


def lock_up_in_c(x: Tensor) -> None:
    """Wait for a lock that this thread holds, with the interpreter's, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def count_in_one_call(x: Tensor) -> None:
    """Compute without ever looking at signals."""
    sum(range(1 << 50))


def fork_without_end(x: Tensor) -> None:
    while True:
        os.fork()


def start_threads_without_end(x: Tensor) -> None:
    while True:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def fill_the_folder(x: Tensor) -> None:
    """Write file after file, and stay."""
    number = 0
    while True:
        with open(Path(tempfile.gettempdir(), f"filling-{number}"), "wb") as file:
            file.write(bytes(8 << 20))
        number += 1


def fill_files_without_names(x: Tensor) -> None:
    held = []
    while True:
        fd, name = tempfile.mkstemp()
        os.unlink(name)
        os.write(fd, bytes(8 << 20))
        held.append(fd)


def write_one_large_file(x: Tensor) -> None:
    with open(Path(tempfile.gettempdir(), "large"), "wb") as file:
        for _ in range(1 << 10):
            file.write(bytes(8 << 20))


def take_descriptors(x: Tensor) -> None:
    held = []
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))


def close_descriptors(x: Tensor) -> None:
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def print_much(x: Tensor) -> None:
    for _ in range(20):
        sys.stdout.write("noise " * 100_000)


def raise_exit(x: Tensor) -> None:
    raise SystemExit(3)


def raise_interrupt(x: Tensor) -> None:
    raise KeyboardInterrupt


def raise_a_long_text(x: Tensor) -> None:
    raise ValueError("long " * 2_000_000)


def write_nonsense(x: Tensor) -> None:
    for fd in range(3, 64):
        with suppress(OSError):
            socket.socket(fileno=os.dup(fd)).send(b"\xc1 no packet")


def replace_functions(x: Tensor) -> Tensor:
    """What only lanes of its own keep from others."""
    torch.nn.Linear.forward = lambda self, x: x.new_full((len(x), self.out_features), 7.0)  # type: ignore[method-assign]
    return torch.zeros(len(x), 2)


#: What the rules for files are about.
AT_FILES = (read_named_files, write_named_files, look_into_processes, connect_to_a_file)
#: What the limits on processes and temporary files are about.
WITHOUT_END = (
    fork_without_end, start_threads_without_end, fill_the_folder, fill_files_without_names,
    write_one_large_file,
)  # fmt: skip
#: What the limits of a model's runs are about.
AT_LIMITS = (take_what_python_gets, spin, count_in_one_call, lock_up_in_c)
#: By number, from 1.
DEEDS = (
    fork, daemonise, leave_a_program, become_another_program, stop_itself, end_itself_by_a_signal,
    kill_the_server, kill_everybody, trace_the_server, connect, leave_threads, change_torch,
    change_the_process, take_signals, forget_modules, change_inputs, return_the_inputs,
    return_too_few_rows, return_nan, return_much, return_a_view_of_more, return_nothing, recurse,
    return_a_sparse_tensor, return_a_scalar, return_a_tensor_without_memory,
    leave_what_is_slow_to_go, sleep_at_the_end,
    take_memory_of_torch, take_memory_of_python, take_descriptors, close_descriptors, print_much,
    raise_exit, raise_interrupt, raise_a_long_text, write_nonsense, replace_functions, *AT_FILES,
    *AT_LIMITS, *WITHOUT_END,
)  # fmt: skip


class Harm(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> object:
        number = float(x[0, 0]) if len(x) else 0.0
        if number >= 1.0 and number == int(number) and number <= len(DEEDS):
            found = DEEDS[int(number) - 1](x)
            if found is not None:
                return found
        return self.linear(x)


def build(in_channels: int = 4, out_channels: int = 2) -> Harm:
    return Harm(in_channels, out_channels)
