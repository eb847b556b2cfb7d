"""The model repository on disk: its models, and what exactly is wrong with broken ones.

    <root>/<name>/config.toml                            see ``model_config``
    <root>/<name>/<version>/weights.safetensors          version: 1, 2, 3, …
    <root>/<name>/model.py                               optional, for factory = "./model.py:…"
    <root>/<name>/versions.toml                          optional, see ``version_file``

Reading it needs no torch and runs no model code: the main process does it. Lanes load models from
the ``ModelSpec`` that they are sent, see ``serve.lane.models.loader``.
"""

import hashlib
import importlib.util
import os
import re
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal

import msgspec

from serve.errors import ConfigError, UnknownName
from serve.files import open_regular, printable
from serve.interface import Interface
from serve.models.declaration import interface_of
from serve.models.model_config import CONFIG_FILE, ModelConfig, read_settings
from serve.models.version_file import read_rules
from serve.models.weights_file import check_weights

WEIGHTS_FILE = "weights.safetensors"

#: Upper bound of an encoded spec, which must fit a packet to a lane with room to spare.
_MAX_SPEC_BYTES = 1 << 16
#: Longest text of a fault, and of a name that a client made up, in messages.
_MAX_REASON, _MAX_NAME = 1000, 100

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one model, checked as far as possible without running it."""

    name: str
    version: int
    #: Absolute path of the model's folder, which holds all versions.
    folder: str
    factory: str
    args: dict[str, Any]
    #: Names of the tensors passed to forward, by position.
    inputs: tuple[str, ...]
    #: What forward takes and returns, if the model declares that; None for the short form.
    interface: Interface | None = None
    #: None for the server's default.
    qos_factor: float | None
    #: Method that is called instead of forward, and its arguments that no request brings.
    method: str = "forward"
    method_args: dict[str, Any] = {}
    #: Absolute path of the safetensors file, and its size.
    weights: str
    weights_bytes: int
    num_features: int | None = None
    #: As in config.toml: `count`, `finite` or `off`.
    check_output: str = "count"
    #: As in config.toml: `shared`, `model`, or a name.
    isolation: str = "shared"
    #: As in config.toml, in bytes and in ns; None for no limit of the model's own.
    max_memory_bytes: int | None = None
    max_run_ns: int | None = None
    description: str = ""
    #: As in config.toml; None to derive them from the model's receptive field.
    fanouts: tuple[int, ...] | dict[str, tuple[int, ...]] | Literal["all"] | None = None
    #: Paths of the server's copies of the weights and of the factory's file, see
    #: ``sealed_copies``; empty when the files of the repository are read.
    copied_weights: str = ""
    #: Some names of weights with NaN or infinity; known once they are copied.
    nonfinite_weights: tuple[str, ...] = ()
    copied_source: str = ""

    @property
    def config_file(self) -> Path:
        """Path of the config.toml."""
        return Path(self.folder) / CONFIG_FILE

    @property
    def weights_file(self) -> Path:
        """Path from which the weights are read: the copy if there is one."""
        return Path(self.copied_weights or self.weights)

    @property
    def source_file(self) -> Path | None:
        """The factory's file in the model's folder; None when it is in an installed package."""
        file, _, _ = self.factory.partition(":")
        return Path(self.folder) / file if file.startswith("./") else None

    @property
    def batches(self) -> tuple[tuple[str, int], ...]:
        """Inputs that tell the graph of each of some things, and the place of their count."""
        if self.interface is None:
            return (("batch", 0),) if "batch" in self.inputs else ()
        counts = self.interface.counts
        return tuple((slot.name, counts.index(slot.symbols[0])) for slot in self.interface.batches)

    @property
    def domain(self) -> str:
        """Trust domain, whose lanes run no other's models; empty for that of `shared` models."""
        return trust_domain(self.name, self.isolation)

    @property
    def key(self) -> str:
        """`name:version`, by which messages name the model."""
        return f"{self.name}:{self.version}"


class BrokenModel(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the repository that cannot be served, and why."""

    name: str
    #: None when the fault is the whole model's.
    version: int | None
    reason: str


def scan(root: Path) -> tuple[ModelSpec | BrokenModel, ...]:
    """Return every model and version under `root`, by name, then version, broken ones too.

    Raises ConfigError when `root` is not a folder.
    """
    return tuple(found for name in _names(root) for found in _scan_model(root / name))


def scan_model(root: Path, name: str) -> tuple[ModelSpec | BrokenModel, ...]:
    """Return every version of one model; raises UnknownName for an unknown name."""
    names = _names(root)
    if name not in names:
        raise UnknownName(
            f"unknown model '{_clipped(name)}'; the repository holds: {_listed(names)}"
        )
    return tuple(_scan_model(root / name))


def find(root: Path, name: str, version: str = "") -> ModelSpec:
    """Return one version of a model, the newest when `version` is empty.

    Raises UnknownName for an unknown name or version, ConfigError for a broken one.
    """
    found = scan_model(root, name)
    versions = {str(entry.version): entry for entry in found if entry.version is not None}
    if version and versions and version not in versions:
        raise UnknownName(
            f"model '{name}' has no version '{_clipped(version)}'; it has: {_listed(versions)}"
        )
    entry = versions[version] if version in versions else (list(versions.values()) or found)[-1]
    if isinstance(entry, BrokenModel):
        raise ConfigError(entry.reason)
    return entry


def unknown_names(root: Path, names: tuple[str, ...]) -> list[str]:
    """Return an error message for each of `names` that is no model of the repository."""
    known = _names(root)
    return [
        f"models.load: '{_clipped(name)}' is not in {root}; it holds: {_listed(known)}"
        for name in names
        if name not in known
    ]


def is_version(text: str) -> bool:
    """Return True for the name of a version: a positive integer in plain digits."""
    return _VERSION.fullmatch(text) is not None


def version_order(version: str) -> tuple[int, str]:
    """Return the key that sorts names of versions by their numbers; the empty name comes first."""
    return len(version), version


def folders_of_others(root: Path, domain: str) -> tuple[Path, ...]:
    """Return the folders of models under `root` that are in other trust domains, sorted.

    A folder whose config.toml cannot be read is another's. Returns none when `root` is no folder.
    """
    try:
        folders = [root / name for name in _names(root)]
    except ConfigError:
        return ()
    return tuple(folder for folder in folders if _domain_of(folder) != domain)


def _domain_of(folder: Path) -> str | None:
    """Return the trust domain of the model in a folder; None when it cannot be told."""
    try:
        return trust_domain(folder.name, read_settings(folder).model.isolation)
    except Exception:  # as for `_scan_model`, a strange file is one model's fault
        return None


def trust_domain(name: str, isolation: str) -> str:
    """Return the trust domain of a model whose config.toml has this isolation."""
    if isolation == "shared":
        return ""
    return f"model {name}" if isolation == "model" else f"domain {isolation}"


def content_hash(spec: ModelSpec) -> str:
    """Return the SHA-256 over the config, the weights and the source file of the factory.

    Equal hashes mean equal computations as long as the packages imported by that file are the
    same; a cache adds their versions to its key. Raises ConfigError when a file cannot be read.
    """
    digest = hashlib.sha256()
    source = (
        Path(spec.copied_source) if spec.copied_source else spec.source_file or _installed(spec)
    )
    for path in (spec.config_file, spec.weights_file, source):
        digest.update(b"\0file\0")
        if path is not None:
            try:
                with open_regular(path) as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _names(root: Path) -> list[str]:
    """Folders of `root` that are meant as models, sorted."""
    try:
        folders = [entry.name for entry in root.iterdir() if os.path.isdir(entry)]
    except OSError as error:
        raise ConfigError(
            f"{root}: not a model repository (models.repository): {error.strerror}"
        ) from error
    return sorted(name for name in folders if not name.startswith((".", "__")))


def _scan_model(folder: Path) -> list[ModelSpec | BrokenModel]:
    """Return all versions of one model, ascending, or one BrokenModel for the whole model."""
    name = folder.name
    if not _NAME.fullmatch(name):
        reason = f"{folder}: a model's name is made of letters, digits and '_', '-', '.'"
        return [_broken(name, None, reason)]
    try:
        return _scan_versions(folder)
    except OSError as error:
        return [_broken(name, None, f"{folder}: cannot be read: {error.strerror}")]
    except Exception as error:
        # A library failed on a strange file, which must not hide the other models.
        return [_broken(name, None, f"{folder}: {type(error).__name__}: {error}")]


def _scan_versions(folder: Path) -> list[ModelSpec | BrokenModel]:
    """Return all versions in a folder with a valid name; raises OSError."""
    name = folder.name
    try:
        config = read_settings(folder)
        read_rules(folder)
    except ConfigError as error:
        broken: list[int] | list[None] = _versions(folder) or [None]
        return [_broken(name, version, str(error)) for version in broken]
    found: list[ModelSpec | BrokenModel] = []
    for entry in sorted(folder.iterdir()):
        # Other folders are the user's (__pycache__, data), but one that holds weights is a typo.
        if os.path.lexists(entry / WEIGHTS_FILE) and not is_version(entry.name):
            reason = f"{entry}: a version folder is named by a positive integer: 1, 2, 3, …"
            found.append(_broken(name, None, reason))
    versions = _versions(folder)
    if not versions and not found:
        reason = f"{folder}: holds no version; expected {folder / '1' / WEIGHTS_FILE}"
        found.append(_broken(name, None, reason))
    found.extend(_read_version(folder, version, config) for version in versions)
    return found


def _broken(name: str, version: int | None, reason: str) -> BrokenModel:
    """Return an entry with printable, bounded text: file names may be neither text nor short."""
    return BrokenModel(
        name=printable(name), version=version, reason=_clipped(printable(reason), _MAX_REASON)
    )


def _versions(folder: Path) -> list[int]:
    """Return the version folders, ascending."""
    names = (entry.name for entry in folder.iterdir() if os.path.isdir(entry))
    return sorted(int(name) for name in names if is_version(name))


def _read_version(folder: Path, version: int, config: ModelConfig) -> ModelSpec | BrokenModel:
    """Return one version, its weights file checked."""
    weights = folder / str(version) / WEIGHTS_FILE
    model = config.model
    try:
        check_weights(weights)
        interface = None
        if model.input:
            interface = interface_of(model.input, model.output, str(folder / CONFIG_FILE))
        spec = ModelSpec(
            name=folder.name,
            version=version,
            folder=str(folder.absolute()),
            factory=model.factory,
            args=model.args,
            inputs=tuple(slot.name for slot in interface.inputs)
            if interface is not None
            else model.inputs or config.inputs or ("x", "edge_index"),
            interface=interface,
            qos_factor=config.qos.factor,
            method=model.method,
            method_args=model.method_args,
            weights=str(weights.absolute()),
            weights_bytes=weights.stat().st_size,
            num_features=model.num_features,
            check_output=model.check_output,
            isolation=model.isolation,
            max_memory_bytes=model.max_memory_bytes,
            max_run_ns=model.max_run_ns,
            description=model.description,
            fanouts=config.sampling.fanouts,
        )
        _check_size(spec, folder / CONFIG_FILE)
    except ConfigError as error:
        return _broken(folder.name, version, str(error))
    except Exception as error:
        return _broken(folder.name, version, f"{weights}: {type(error).__name__}: {error}")
    return spec


def _check_size(spec: ModelSpec, config: Path) -> None:
    """Raise ConfigError when the spec does not fit a message to a lane."""
    try:
        size_bytes = len(msgspec.msgpack.encode(spec))
    except (OverflowError, RecursionError, TypeError) as error:
        raise ConfigError(f"{config}: model.args: {error}") from error
    if size_bytes > _MAX_SPEC_BYTES:
        raise ConfigError(
            f"{config}: {size_bytes} bytes of settings (usually model.args is the longest); the"
            f" limit is {_MAX_SPEC_BYTES} bytes"
        )


def _installed(spec: ModelSpec) -> Path | None:
    """Return the file of an installed factory without running it; None when it has no file."""
    try:
        return _find_installed(spec.factory.partition(":")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError(f"model {spec.key}: model.factory: {spec.factory!r}: {error}") from error


def _find_installed(module: str) -> Path | None:
    # NOTE: find_spec on a dotted name would import its parents, and with them torch.
    top, *inner = module.split(".")
    spec: ModuleSpec | None = importlib.util.find_spec(top)
    name = top
    for part in inner:
        name = f"{name}.{part}"
        path = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(name, path) if path is not None else None
    has_file = spec is not None and spec.origin is not None and spec.has_location
    return Path(str(spec.origin)) if spec is not None and has_file else None


def _listed(names: list[str] | dict[str, Any]) -> str:
    return printable(", ".join(names)) or "nothing"


def _clipped(text: str, most: int = _MAX_NAME) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
