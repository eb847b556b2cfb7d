"""The model repository on disk: what is in it, and exactly what is wrong with what is broken.

    <root>/<name>/config.toml                            ModelConfig, decoded strictly
    <root>/<name>/<version>/weights.safetensors          version: 1, 2, 3, …
    <root>/<name>/model.py                               optional, for factory = "./model.py:…"

Needs no torch and runs no model code: the main process reads the repository, lanes load from
the ``ModelSpec`` they are sent (see ``loader``).
"""

import hashlib
import importlib.util
import re
import tomllib
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serve.config import Section, decode_table
from serve.errors import ConfigError, NotFound
from serve.models.header import read_header

CONFIG_FILE = "config.toml"
WEIGHTS_FILE = "weights.safetensors"

InputName = Literal["x", "edge_index", "edge_weight", "edge_attr", "batch"]
Dimension = Annotated[int, Meta(ge=1)]
Fanout = Annotated[int, Meta(ge=-1)]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_MODULE_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_FILE_FACTORY = re.compile(r"\./((?!\.\./)[^/:]+/)*[^/:]+\.py:[^\W\d]\w*")


class ModelSection(Section, frozen=True):
    """`[model]`: how to build it and what its forward takes."""

    #: `package.module:callable`, or `./file.py:callable` in the model's folder.
    factory: str
    #: Keyword arguments of the factory.
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    #: Tensors handed to forward, by position.
    inputs: tuple[InputName, ...] | None = None
    #: Columns of `x`; None: found by probing.
    num_features: Dimension | None = None
    #: One line for people.
    description: str = ""


class QosSection(Section, frozen=True):
    """`[qos]`: the model's own promise."""

    #: QoS target as a multiple of the solo time; None: the server's.
    factor: Annotated[float, Meta(ge=1.0)] | None = None


class SamplingSection(Section, frozen=True):
    """`[sampling]`: what is read of a resident graph around the nodes asked for."""

    #: In-neighbours drawn at each hop, -1 for all; or `all` of as many hops as the model looks.
    fanouts: tuple[Fanout, ...] | Literal["all"] | None = None


class ModelConfig(Section, frozen=True):
    """A model's config.toml. `inputs` may stand at the top or in `[model]`, not in both."""

    model: ModelSection
    inputs: tuple[InputName, ...] | None = None
    qos: QosSection = QosSection()
    sampling: SamplingSection = SamplingSection()


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one model, checked as far as that goes without running it."""

    name: str
    version: int
    #: The model's folder (of all versions), absolute.
    folder: str
    factory: str
    args: dict[str, Any]
    #: Tensors handed to forward, by position.
    inputs: tuple[str, ...]
    #: None: the server's default.
    qos_factor: float | None
    #: The safetensors file, absolute, and its size.
    weights: str
    weights_bytes: int
    num_features: int | None = None
    description: str = ""
    #: As in config.toml; None: by how far the model looks.
    fanouts: tuple[int, ...] | Literal["all"] | None = None

    @property
    def key(self) -> str:
        """`name:version`, as tasks and lanes name the model."""
        return f"{self.name}:{self.version}"


class BrokenModel(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the repository that cannot be served, and why."""

    name: str
    #: None: the fault is with the whole model.
    version: int | None
    reason: str


def scan(root: Path) -> tuple[ModelSpec | BrokenModel, ...]:
    """Every model and version under `root`, by name, then version; nothing is skipped silently.

    Raises ConfigError when `root` is not a folder.
    """
    return tuple(found for name in _names(root) for found in _scan_model(root / name))


def find(root: Path, name: str, version: str = "") -> ModelSpec:
    """One version of a model, the newest when `version` is empty.

    Raises NotFound for an unknown name or version, ConfigError for a broken one.
    """
    names = _names(root)
    if name not in names:
        raise NotFound(f"unknown model '{name}'; the repository holds: {_listed(names)}")
    found = _scan_model(root / name)
    versions = {str(entry.version): entry for entry in found if entry.version is not None}
    if version and versions and version not in versions:
        raise NotFound(f"model '{name}' has no version '{version}'; it has: {_listed(versions)}")
    entry = versions[version] if version in versions else (list(versions.values()) or found)[-1]
    if isinstance(entry, BrokenModel):
        raise ConfigError(entry.reason)
    return entry


def content_hash(spec: ModelSpec) -> str:
    """SHA-256 over the config, the weights and the source file of the factory.

    Equal hashes mean the same computation as long as the packages imported by that file are the
    same; a cache adds their versions to its key.
    """
    digest = hashlib.sha256()
    folder = Path(spec.folder)
    for path in (folder / CONFIG_FILE, Path(spec.weights), _source(spec.factory, folder)):
        digest.update(b"\0file\0")
        if path is not None:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _names(root: Path) -> list[str]:
    """Folders of `root` that are meant as models, sorted."""
    try:
        folders = [entry.name for entry in root.iterdir() if entry.is_dir()]
    except OSError as error:
        raise ConfigError(
            f"{root}: not a model repository (models.repository): {error.strerror}"
        ) from error
    return sorted(name for name in folders if not name.startswith((".", "__")))


def _scan_model(folder: Path) -> list[ModelSpec | BrokenModel]:
    """All versions of one model, ascending; one BrokenModel when there is nothing else to say."""
    name = folder.name
    if not _NAME.fullmatch(name):
        reason = f"{folder}: a model's name is made of letters, digits and '_', '-', '.'"
        return [BrokenModel(name=name, version=None, reason=reason)]
    try:
        return _scan_versions(folder)
    except OSError as error:
        reason = f"{folder}: cannot be read: {error.strerror}"
        return [BrokenModel(name=name, version=None, reason=reason)]


def _scan_versions(folder: Path) -> list[ModelSpec | BrokenModel]:
    """What ``_scan_model`` says of a folder with a usable name; raises OSError."""
    name = folder.name
    try:
        config = _read_config(folder)
    except ConfigError as error:
        broken: list[int] | list[None] = _versions(folder) or [None]
        return [BrokenModel(name=name, version=v, reason=str(error)) for v in broken]
    found: list[ModelSpec | BrokenModel] = []
    for entry in sorted(folder.iterdir()):
        # Other folders are the user's own (__pycache__, data); one with weights in it is a typo.
        if (entry / WEIGHTS_FILE).exists() and not _VERSION.fullmatch(entry.name):
            reason = f"{entry}: a version folder is named by a positive integer: 1, 2, 3, …"
            found.append(BrokenModel(name=name, version=None, reason=reason))
    versions = _versions(folder)
    if not versions and not found:
        reason = f"{folder}: holds no version; expected {folder / '1' / WEIGHTS_FILE}"
        found.append(BrokenModel(name=name, version=None, reason=reason))
    found.extend(_read_version(folder, version, config) for version in versions)
    return found


def _versions(folder: Path) -> list[int]:
    """Version folders, ascending."""
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if _VERSION.fullmatch(name))


def _read_version(folder: Path, version: int, config: ModelConfig) -> ModelSpec | BrokenModel:
    """One version with its weights file checked."""
    weights = folder / str(version) / WEIGHTS_FILE
    model = config.model
    try:
        read_header(weights)
        return ModelSpec(
            name=folder.name,
            version=version,
            folder=str(folder.resolve()),
            factory=model.factory,
            args=model.args,
            inputs=model.inputs or config.inputs or ("x", "edge_index"),
            qos_factor=config.qos.factor,
            weights=str(weights.resolve()),
            weights_bytes=weights.stat().st_size,
            num_features=model.num_features,
            description=model.description,
            fanouts=config.sampling.fanouts,
        )
    except ConfigError as error:
        return BrokenModel(name=folder.name, version=version, reason=str(error))


def _read_config(folder: Path) -> ModelConfig:
    """Read and cross-check a model's config.toml; raises ConfigError."""
    path = folder / CONFIG_FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    config = decode_table(table, ModelConfig, str(path))
    model = config.model
    inputs = model.inputs if config.inputs is None else config.inputs
    if config.inputs is not None and model.inputs is not None:
        raise ConfigError(f"{path}: inputs and model.inputs are both given; keep one")
    if inputs is None and "inputs" in model.args:
        raise ConfigError(
            f"{path}: model.args.inputs: TOML puts a key under the last header above it;"
            " write inputs above [model.args]"
        )
    if inputs is not None and ("x" not in inputs or len(set(inputs)) != len(inputs)):
        raise ConfigError(f"{path}: inputs: {list(inputs)} must hold 'x', and no name twice")
    if not _MODULE_FACTORY.fullmatch(model.factory) and not _FILE_FACTORY.fullmatch(model.factory):
        raise ConfigError(
            f"{path}: model.factory: {model.factory!r} is neither 'package.module:callable'"
            " nor './file.py:callable' in the model's folder"
        )
    if config.sampling.fanouts is not None and 0 in config.sampling.fanouts:
        raise ConfigError(f"{path}: sampling.fanouts: 0 is neither positive nor -1 (all)")
    file_name = model.factory.partition(":")[0]
    if model.factory.startswith("./") and not (folder / file_name).is_file():
        raise ConfigError(f"{path}: model.factory: {folder / file_name} does not exist")
    return config


def _source(factory: str, folder: Path) -> Path | None:
    """The file that defines the factory, found without running it; None when there is none."""
    module, _, _ = factory.partition(":")
    if module.startswith("./"):
        return folder / module
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
    return ", ".join(names) or "nothing"
