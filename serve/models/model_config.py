"""A model's config.toml: its schema, and exactly what is wrong with a broken one."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serve.errors import ConfigError
from serve.files import open_regular
from serve.inputs import InputName
from serve.models.declaration import InputSection, OutputSection, interface_of
from serve.toml_tables import Section, decode_table, read_toml
from serve.units import parse_bytes

CONFIG_FILE = "config.toml"

CheckOutput = Literal["count", "finite", "off"]
Dimension = Annotated[int, Meta(ge=1)]
Fanout = Annotated[int, Meta(ge=-1)]

#: Largest source file of a factory.
_MAX_SOURCE_BYTES = 16 << 20

_MODULE_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_METHOD = re.compile(r"[^\W\d]\w*(\.\w+)*")
_FILE_FACTORY = re.compile(r"\./((?!\.\./)[^/:]+/)*[^/:]+\.py:[^\W\d]\w*")


class ModelSection(Section, frozen=True):
    """`[model]`: the model's factory and the inputs of its forward."""

    #: `package.module:callable`, or `./file.py:callable` in the model's folder.
    factory: str
    #: Keyword arguments of the factory.
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    #: Method to call instead of forward, by its name or path: `encode`, `encoder`, `head.scores`.
    method: str = "forward"
    #: Keyword arguments of the method that are the same in every request.
    method_args: dict[str, Any] = msgspec.field(default_factory=dict)
    #: Names of the tensors passed to forward, by position.
    inputs: tuple[InputName, ...] | None = None
    #: Instead of `inputs`: everything that forward takes and returns.
    input: tuple[InputSection, ...] = ()
    output: tuple[OutputSection, ...] = ()
    #: Columns of `x`; None to find it by probing.
    num_features: Dimension | None = None
    #: NaN and infinity in outputs: `count` such answers, send `finite` ones only, or look for none.
    check_output: CheckOutput = "count"
    #: Whom the model shares its processes with: `shared`, all others that say so; `model`, nobody;
    #: another name, those that say the same.
    isolation: Annotated[str, Meta(pattern=r"^[\w.-]{1,64}$")] = "shared"
    #: Memory that a run may take: inputs, activations and outputs. None: what the device has.
    max_memory: str | None = None
    #: Time that a run may take with a core; None: as for every model, see `server.max_run_s`.
    max_run_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    #: One line for people.
    description: str = ""

    @property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` in bytes; raises ConfigError when it is no size."""
        if self.max_memory is None:
            return None
        return parse_bytes(self.max_memory, "model.max_memory")

    @property
    def max_run_ns(self) -> int | None:
        """`max_run_s` in nanoseconds."""
        return None if self.max_run_s is None else int(self.max_run_s * 1e9) + 1


class QosSection(Section, frozen=True):
    """`[qos]`: the model's QoS target."""

    #: QoS target as a multiple of the solo time; None for the server's factor.
    factor: Annotated[float, Meta(ge=1.0, le=1e6)] | None = None


class SamplingSection(Section, frozen=True):
    """`[sampling]`: the neighbourhood of requested nodes in a resident graph."""

    #: In-neighbours drawn at each hop, -1 for all; or `all`, the whole receptive field. A table
    #: has them by type of edges, 0 for none.
    fanouts: tuple[Fanout, ...] | dict[str, tuple[Fanout, ...]] | Literal["all"] | None = None


class ModelConfig(Section, frozen=True):
    """A model's config.toml. `inputs` may stand at the top or in `[model]`, not in both."""

    model: ModelSection
    inputs: tuple[InputName, ...] | None = None
    qos: QosSection = QosSection()
    sampling: SamplingSection = SamplingSection()


def read_settings(folder: Path) -> ModelConfig:
    """Read and cross-check the config.toml in a model's folder; raises ConfigError."""
    path = folder / CONFIG_FILE
    config = decode_table(read_toml(path), ModelConfig, str(path))
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
    if model.input or model.output:
        if inputs is not None:
            raise ConfigError(f"{path}: inputs and model.input are both given; keep one")
        if model.num_features is not None:
            raise ConfigError(f"{path}: model.num_features: model.input tells all shapes")
        interface_of(model.input, model.output, str(path))
    if not _MODULE_FACTORY.fullmatch(model.factory) and not _FILE_FACTORY.fullmatch(model.factory):
        raise ConfigError(
            f"{path}: model.factory: {model.factory!r} is neither 'package.module:callable'"
            " nor './file.py:callable' in the model's folder"
        )
    if not _METHOD.fullmatch(model.method):
        raise ConfigError(
            f"{path}: model.method: {model.method!r} is no name of a method, such as 'encode'"
        )
    try:
        _ = model.max_memory_bytes
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if isinstance(config.sampling.fanouts, tuple) and 0 in config.sampling.fanouts:
        raise ConfigError(f"{path}: sampling.fanouts: 0 is neither positive nor -1 (all)")
    if model.factory.startswith("./"):
        _check_source(folder / model.factory.partition(":")[0], path)
    return config


def _check_source(source: Path, config: Path) -> None:
    """Raise ConfigError unless the factory's file can be read."""
    try:
        with open_regular(source) as file:
            size_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise ConfigError(f"{config}: model.factory: {source} does not exist") from error
    except OSError as error:
        raise ConfigError(
            f"{config}: model.factory: {source}: cannot be read: {error.strerror}"
        ) from error
    if size_bytes > _MAX_SOURCE_BYTES:
        raise ConfigError(
            f"{config}: model.factory: {source} has {size_bytes} bytes; the limit is"
            f" {_MAX_SOURCE_BYTES} bytes"
        )
