"""Compile a model ahead of time, in a process of its own.

The model is exported for any numbers of nodes and edges and compiled by AOTInductor with g++.
That takes 5 to 10 s, and longer the first time on a machine, when it detects the processor's
features. The compiler is imported and works in another process, so that the process which measures
models stays as small and quiet as a lane.

    python -m serve.lane.executors.compiling < job
"""

import ctypes
import inspect
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from serve.ipc.passing import copies_of
from serve.lane.executors.compiled import BENEATH, CONSTANTS, LEAST, weights_of
from serve.lane.executors.csr import CannotRun
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.model_signature import Signature, compiler
from serve.models.repository import ModelSpec

_log = logging.getLogger(__name__)

_EXAMPLE = 70, 300
#: Default time limit of one compilation.
TIMEOUT_S = 150.0
_PR_SET_PDEATHSIG = 1
#: Environment variables that are for lanes alone.
_OF_LANES = ("LD_PRELOAD", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


class CompileJob(msgspec.Struct, frozen=True):
    """A model to compile for an executor into the folder `package`."""

    spec: ModelSpec
    signature: Signature
    executor: str
    package: str
    threads: int


def compile_apart(
    spec: ModelSpec,
    signature: Signature,
    executor: str,
    package: Path,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run ``compile_model`` in a process of its own, for this process's number of threads.

    Raises CannotRun with the compiler's reason.
    """
    if shutil.which(compiler()) is None:
        raise CannotRun(f"there is no {compiler()}")
    job = CompileJob(spec, signature, executor, str(package), torch.get_num_threads())
    environment = {key: value for key, value in os.environ.items() if key not in _OF_LANES}
    # Kept beside the packages: it records the processor's features.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(package.parent / "inductor"))
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=msgspec.json.encode(job),
            env=environment,
            capture_output=True,
            pass_fds=copies_of(spec),
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"it did not compile within {timeout_s:g} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        _log.info("model %s: %s", spec.key, said)
        raise CannotRun(f"it does not compile: {said.splitlines()[-1] if said else 'no reason'}")


def compile_model(loaded: LoadedModel, signature: Signature, executor: str, package: Path) -> None:
    """Compile `loaded` for `executor` into the folder `package`, replacing its content.

    `loaded` must not be used afterwards. Raises CannotRun, or any error of export and compiler.
    """
    loaded = BENEATH[executor](loaded)
    known = set(weights_of(loaded.module))
    _name_tensors(loaded.module)
    try:
        program = _export(loaded, signature)
        constants = _constants(program, known)
        _write(program, constants, package)
    finally:
        if loaded.after_run is not None:
            loaded.after_run()


def _export(loaded: LoadedModel, signature: Signature) -> Any:
    """Export the model for any numbers of nodes and edges from two up."""
    names = loaded.spec.inputs
    if "x" not in names or "edge_index" not in names:
        raise CannotRun("its inputs are not x and edge_index")
    inputs = probe_graph(*_EXAMPLE, Shape.PLAIN, names, signature)
    most = 2**31 - 1
    nodes, edges = (torch.export.Dim(name, min=LEAST, max=most) for name in ("nodes", "edges"))
    sizes = {"x": {0: nodes}, "edge_index": {1: edges}, "edge_weight": {0: edges},
             "edge_attr": {0: edges}, "batch": {0: nodes}}  # fmt: skip
    with torch.no_grad():
        return torch.export.export(
            loaded.module,
            tuple(inputs[name] for name in names),
            dynamic_shapes=_by_parameter(loaded.module, [sizes[name] for name in names]),
            strict=False,
        )


def _name_tensors(module: torch.nn.Module) -> None:
    """Make tensors that are plain attributes buffers, so that they have names."""
    for layer in module.modules():
        for name, value in list(vars(layer).items()):
            if type(value) is Tensor:
                delattr(layer, name)
                layer.register_buffer(name, value, persistent=False)


def _by_parameter(module: torch.nn.Module, sizes: list[dict[int, Any]]) -> Any:
    """Return sizes in the form that export expects: one for each parameter, *args as one."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    for place, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return (*sizes[:place], *([tuple(sizes[place:])] if sizes[place:] else []))
    return tuple(sizes)


def _constants(program: Any, known: set[str]) -> dict[str, Tensor]:
    """Return the program's tensors that are not among those `known` from the model."""
    held = program.constants | program.state_dict
    return {
        name: value.detach().clone().contiguous()
        for name, value in held.items()
        if name not in known and isinstance(value, Tensor)
    }


def _write(program: Any, constants: dict[str, Tensor], package: Path) -> None:
    """Compile the program; the folder appears only when it is complete."""
    package.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=package.parent) as scratch:
        from torch import _inductor

        archive = Path(scratch) / "model.pt2"
        options = {
            "aot_inductor.package_constants_in_so": False,
            "cpp.threads": torch.get_num_threads(),
        }
        with _inductor.config.patch(compile_threads=1):
            _inductor.aoti_compile_and_package(
                program, package_path=str(archive), inductor_configs=options
            )
        made = Path(scratch) / "made"
        with zipfile.ZipFile(archive) as files:
            files.extractall(made)
        save_file(constants, made / CONSTANTS)
        shutil.rmtree(package, ignore_errors=True)
        made.rename(package)


def main() -> None:
    """Compile the job on stdin; on failure the last line of stderr is the reason."""
    # If the asking process is killed, nobody else would end this one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
    torch.set_num_threads(job.threads)
    # PyTorch causes these warnings itself.
    warnings.simplefilter("ignore")
    try:
        compile_model(load_model(job.spec), job.signature, job.executor, Path(job.package))
    except Exception as error:
        _log.exception("not compiled")
        lines = str(error).strip().splitlines()
        sys.exit(f"{type(error).__name__}: {lines[0] if lines else ''}")


if __name__ == "__main__":
    main()
