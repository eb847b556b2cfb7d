"""A wheel with our kernels: nvcc builds it, and it serves machines without a GPU as any other."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from bench.kit.result import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LIBRARY = "serve/libgnnserve_cuda.so"
#: What a wheel may weigh that holds code for one architecture.
MOST_BYTES = 16 << 20
PROGRAM = """
from serve.config_device import DeviceConfig
from serve.native_cuda import CUDA_LIBRARY, CudaError, CudaLibrary, library_path
from serve.server.device import find_device

print(library_path(CUDA_LIBRARY))
try:
    CudaLibrary().slab(0, 1 << 20)
except CudaError as error:
    print(error)
print(find_device(DeviceConfig(), spare_lanes=False).name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that `make cuda-wheel` builds, for one architecture."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    folder = tmp_path_factory.mktemp("wheel")
    options = (
        "-DGNNSERVE_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90-real", f"-DCMAKE_CUDA_COMPILER={nvcc}"
    )  # fmt: skip
    subprocess.run(
        [
            sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "wheel",
            "--no-deps", "--no-build-isolation", "-C", f"build-dir={ROOT}/build/cuda-wheel-90",
            "-w", folder, ".",
        ],
        cwd=ROOT, check=True, env={**os.environ, "CMAKE_ARGS": " ".join(options)},
    )  # fmt: skip
    (found,) = folder.glob("gnnserve-*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel):
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_library_is_in_it(wheel, unpacked):
    assert (unpacked / LIBRARY).is_file()
    assert wheel.stat().st_size < MOST_BYTES


def test_it_needs_neither_a_driver_nor_a_runtime_to_load(unpacked):
    told = subprocess.run(
        ["readelf", "-d", unpacked / LIBRARY], check=True, capture_output=True, text=True
    ).stdout
    needed = [line for line in told.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "libcu" in line]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_serves_on_its_processor(unpacked, tmp_path):
    # Without the hooks of an editable install, which would import the checkout.
    path = os.pathsep.join((str(unpacked), sysconfig.get_path("purelib")))
    found = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    library, refused, device = found.stdout.splitlines()
    assert library == str(unpacked / LIBRARY)
    assert refused.startswith("cudaMalloc of 1048576 bytes on device 0: ")
    assert device.startswith("cpu: ")
