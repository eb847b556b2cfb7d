"""The stages of ``make gpu-check``: commands, requirements, time limits."""

import sys
from collections.abc import Collection
from dataclasses import dataclass

from bench.kit.machine import gpu_facts

ALL = "all"
#: Used where the GPU's architecture cannot be found out.
_DEFAULT_ARCHITECTURE = "90-real"
#: Time limit of a stage on a processor.
_DRY_LIMIT_S = 900
#: More time for stages that find nothing compiled: of 15 s, imports of torch and PyG took 13 there.
_START_S = 20
#: Modules that a lane and the engine import beside torch.
_ENGINE = "msgspec", "safetensors", "prometheus_client"
#: Stages that build what others load; the second one, the operators and all else that is compiled.
_BUILDS = "libraries", "extension"


@dataclass(frozen=True)
class Stage:
    """One shell command."""

    name: str
    command: str
    #: Usual time on an H200; it is not begun with less time left.
    usual_s: int
    #: Time after which it is ended.
    limit_s: int
    #: Modules it imports that a machine may lack.
    needs: tuple[str, ...] = ()
    #: Programs it calls that a machine may lack.
    programs: tuple[str, ...] = ()
    #: Stages that must have passed before.
    after: tuple[str, ...] = ()
    #: True when it builds what others need on this machine, so that it runs on every machine.
    prepares: bool = False
    #: True when it measures less in less time.
    quick: bool = False


def stages(quick: Collection[str] = (), *, dry: bool = False) -> list[Stage]:
    """Return all stages, the most informative first, as time on a GPU may end at any of them.

    `quick` names stages that measure less in less time, or ALL. With `dry` they are scripts only,
    on the processor.
    """
    python = sys.executable

    def stage(
        script: str,
        usual_s: int,
        quick_s: int,
        needs: tuple[str, ...] = (),
        name: str = "",
        *,
        extends: bool = False,
    ) -> Stage:
        name = name or script.rpartition(".")[2]
        short = ALL in quick or name in quick
        command = f"{python} -m {script}" + " --quick" * short + " --dry" * dry
        usual_s = quick_s if short else usual_s
        limit_s = _DRY_LIMIT_S if dry else 2 * usual_s + _START_S
        builds = () if dry else _BUILDS if needs or extends else _BUILDS[:1]
        return Stage(name, command, usual_s, limit_s, needs, after=builds, quick=short)

    def serving(part: str, usual_s: int, quick_s: int) -> Stage:
        return stage(f"tests.gpu.serving {part}", usual_s, quick_s, _ENGINE, f"serving_{part}")

    before = [] if dry else _preparing(python)
    alive = [
        stage("tests.gpu.arena", 20, 15),
        stage("tests.gpu.equality", 40, 25),
        stage("tests.gpu.heavy", 45, 20, extends=True),
    ]
    checked = [] if dry else [_sanitized(python, tool) for tool in ("memcheck", "racecheck")]
    engine = [
        # The first to start an engine: it calibrates the models for all of them.
        stage("tests.gpu.unions", 110, 80, _ENGINE),
        stage("bench.gpu.pmc", 60, 20, _ENGINE),
        stage("tests.gpu.declared", 150, 70, _ENGINE),
        serving("equality", 200, 60),
        serving("soak", 150, 60),
    ]
    more = [
        stage("bench.gpu.concurrency", 240, 60),
        stage("bench.gpu.isolation", 60, 20),
        stage("bench.gpu.kernels", 150, 40, _ENGINE),
        stage("bench.gpu.launching", 20, 10, _ENGINE),
        stage("bench.gpu.replayed", 90, 30, _ENGINE),
        stage("bench.gpu.gather", 190, 45),
        stage("bench.gpu.features", 90, 30),
        serving("pressure", 40, 25),
        serving("without_kernels", 90, 50),
        stage("bench.gpu.figures", 400, 180, _ENGINE, "serving_figures"),
    ]
    tests = "cmake --build build/gpu/tests && ctest --test-dir build/gpu/tests --output-on-failure"
    after = [] if dry else [Stage("ctest", tests, 120, 240, after=("libraries",))]
    return [*before, *alive, *engine[:1], *checked, *engine[1:], *more, *after]


def _preparing(python: str) -> list[Stage]:
    """Return the stages that build: CUDA's sources are compiled for the GPU at hand only."""
    smi = "nvidia-smi; nvidia-smi topo -m; nvcc --version"
    torch = f"{python} -c 'import torch; print(torch.__version__, torch.cuda.is_available())'"
    libraries = (
        "cmake -S csrc -G Ninja -B build/gpu/tests -DGNNSERVE_CUDA=ON"
        f" -DCMAKE_CUDA_ARCHITECTURES={architecture()}"
        " && cmake --build build/gpu/tests --target gnnserve_device gnnserve_cuda"
        " && cp build/gpu/tests/libgnnserve_{device,cuda}.so serve/"
    )
    extension = (
        "cmake -S csrc -G Ninja -B build/gpu/extension -DGNNSERVE_CUDA=OFF -DSKBUILD=2"
        f" -DPython_EXECUTABLE={python} -Dnanobind_DIR=$({python} -m nanobind --cmake_dir)"
        " && cmake --build build/gpu/extension --target _core gnnserve_meter"
        " && cp build/gpu/extension/{_core*,libgnnserve_meter}.so serve/"
    )
    return [
        Stage("machine", f"{smi}; {torch}", 15, 60),
        Stage("libraries", libraries, 40, 240, prepares=True),
        Stage("extension", extension, 30, 240, prepares=True),
    ]


def _sanitized(python: str, tool: str) -> Stage:
    """Return a stage that runs our kernels on small graphs under a tool of compute-sanitizer.

    Every tensor has memory of its own, so that a write past its end is noticed.
    """
    command = (
        f"PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool {tool} --error-exitcode 9"
        f" {python} -m tests.gpu.heavy --quick --plain --out build/gpu/results/{tool}.json"
    )
    programs = ("compute-sanitizer",)
    return Stage(tool, command, 60, 150, programs=programs, after=_BUILDS)


def architecture() -> str:
    """Return the architecture of the first GPU, as CMake names it."""
    number = "".join(gpu_facts("compute_cap")).replace(".", "")
    return f"{number}-real" if number.isdigit() else _DEFAULT_ARCHITECTURE
