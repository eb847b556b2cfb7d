"""The on-disk cache of calibrations: a model is measured once per machine, not at every start.

One JSON file per key, and a folder where the model was compiled. A key names everything that a
measurement depends on: the model's content, the versions of the packages that run it, the machine,
the allocator, the executor and the number of threads. A file that cannot be read is logged and
ignored. The cache is pruned to a size, see ``cache_pruning``.
"""

import hashlib
import logging
import os
import platform
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.estimate.calibration import FORMAT, Calibration
from serve.models.cache_pruning import hold, prune, touch
from serve.models.model_signature import PACKAGED, Signature

_log = logging.getLogger(__name__)

#: Suffixes of the files of a compiled package that lanes map.
_MAPPED = (".so", ".safetensors")
#: Patterns of calibrations, compiled models, and torch's own compilation cache.
_KEPT = ("*.json", "*.compiled", "inductor")
_PACKAGES = ("torch", "torch-geometric", "gnnserve")


class _Entry(msgspec.Struct, frozen=True):
    signature: Signature
    calibration: Calibration


class CalibrationCache:
    """Signatures and calibrations in a folder, by the model's content hash."""

    def __init__(
        self,
        folder: Path,
        *,
        executor: str = "eager",
        device: str = "cpu",
        threads: int = 1,
        budget_s: float = 6.0,
        allocator: tuple[str, ...] = (),
        compiles: bool = False,
        limit_bytes: int = 2 << 30,
    ) -> None:
        """Use `folder` for measurements made under the circumstances given by the other arguments.

        Args:
            folder: Made when something is stored.
            executor: As configured, a name or `auto`.
            device: Name of the device.
            threads: Threads of one run.
            budget_s: Time for timing one model; more time makes another, more exact calibration.
            allocator: Settings that the speed and peaks of the lanes' allocator depend on.
            compiles: True when models may be compiled; compiled packages are kept here too.
            limit_bytes: Upper bound of the folder's size.
        """
        self._folder, self._compiles, self._limit_bytes = folder, compiles, limit_bytes
        if compiles:  # lanes may not open what is made after they start
            with suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        runs_on = executor, device, f"{threads} threads", f"timed for {budget_s} s", *allocator
        if compiles:
            runs_on = *runs_on, "compiled"
        self._circumstances = "\n".join([f"format {FORMAT}", *_versions(), *_machine(), *runs_on])

    def get(self, content: str) -> tuple[Signature, Calibration] | None:
        """Return what was stored for that content hash under these circumstances, else None."""
        path = self._path(content)
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("calibration %s is ignored: %s", path, error)
            return None
        touch(path)
        if entry.calibration.executor in PACKAGED:
            package = self._package(content)
            if not hold(package):  # a lane that restarts opens it again
                _log.warning("calibration %s is ignored: %s is gone", path, package)
                return None
            touch(package)
        return entry.signature, entry.calibration

    def forget(self, content: str) -> bool:
        """Delete what was stored for that content hash; return False when there was nothing.

        Raises ConfigError when it cannot be deleted. A compiled package stays for its users.
        """
        path = self._path(content)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"{path}: cannot be deleted: {error.strerror}") from error
        return True

    @property
    def compiles(self) -> bool:
        """True when models may be compiled."""
        return self._compiles

    def package(self, content: str) -> str:
        """Return the folder for the compiled package; empty when models are not compiled."""
        return str(self._package(content)) if self._compiles else ""

    def compiles_into(self) -> tuple[str, ...]:
        """Return the folders that compiling a model writes to; none where nothing is compiled."""
        if not self._compiles:
            return ()
        compilers = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        return (str(self._folder), *([compilers] if compilers else []))

    def package_bytes(self, content: str) -> int:
        """Return the bytes of the compiled package that lanes map."""
        files = (path for path in self._package(content).rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files if path.suffix in _MAPPED)

    def _package(self, content: str) -> Path:
        return self._path(content).with_suffix(".compiled")

    def put(self, content: str, signature: Signature, calibration: Calibration) -> None:
        """Store a calibration and prune the cache; log a warning if it cannot be written."""
        path = self._path(content)
        data = msgspec.json.format(msgspec.json.encode(_Entry(signature, calibration)))
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Renaming is atomic: readers see the old file or the new one.
            with tempfile.NamedTemporaryFile(
                dir=self._folder, suffix=path.suffix, delete=False
            ) as file:
                file.write(data)
            os.replace(file.name, path)
            if calibration.executor in PACKAGED:
                hold(self._package(content))
            prune((p for name in _KEPT for p in self._folder.glob(name)), self._limit_bytes)
        except OSError as error:
            _log.warning("calibration %s cannot be kept: %s", path, error)

    def _path(self, content: str) -> Path:
        key = hashlib.sha256(f"{content}\n{self._circumstances}".encode()).hexdigest()
        return self._folder / f"{key[:32]}.json"


def require_own(folder: Path) -> None:
    """Raise ConfigError when others own the cache's folder or may write to it.

    Lanes run the code in it, and reservations follow from it. A folder that is not there is fine.
    """
    try:
        stat = folder.stat()
    except OSError:
        return
    if stat.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"models.cache: {folder} belongs to user {stat.st_uid}, and the server runs as user "
            f"{os.geteuid()}; lanes run code from it, so it must be the server's own"
        )
    if stat.st_mode & 0o022:
        raise ConfigError(
            f"models.cache: {folder} has the mode {stat.st_mode & 0o7777:04o}, but only its owner "
            f"may write it, as lanes run code from it; chmod go-w {folder}"
        )


def _versions() -> list[str]:
    """Return name and version of every package whose change invalidates measurements."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} from source")
    return found


def _machine() -> list[str]:
    """Return the processor and the number of cores that this process may use."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return [platform.machine(), model, f"{len(os.sched_getaffinity(os.getpid()))} cores"]
