"""Which versions are served, from which bytes, over lanes that load at once what they are told."""

import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from bench.kit.waiting import PATIENCE_S
from serve.core.types import LaneId
from serve.errors import ConfigError, ModelError, NotReady, UnknownName
from serve.ipc.messages import LoadModel
from serve.lane.models.loader import load_model
from serve.models import sealed_copies
from serve.models.cache import CalibrationCache
from serve.models.repository import ModelSpec, find
from serve.models.sealed_copies import SealedCopies
from serve.server.catalogue import Registry
from tests.estimate.conftest import SIGNATURE
from tests.estimate.conftest import calibration as _calibration

CODE = "import torch\n\n\ndef build():\n    return torch.nn.Linear(2, 2)\n"
CONFIG = '[model]\nfactory = "./model.py:build"\n'
LANES = 2


@dataclass
class Lanes:
    """Stands for a pool: each lane reads what it is told to load and answers."""

    calibration: object
    registry: Registry | None = None
    #: Versions that no lane and no calibrator can load, and why.
    refused: dict[int, str] = field(default_factory=dict)
    #: (weights, code) that each lane read last, by model and version.
    read: dict[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    calibrators: object = field(default_factory=lambda: SimpleNamespace(interrupted=False))

    def send(self, lane_id, message):
        if isinstance(message, LoadModel):
            spec = message.spec
            source = Path(spec.copied_source or spec.source_file)
            self.read[lane_id, spec.key] = spec.weights_file.read_bytes(), source.read_bytes()
            failure = self.refused.get(spec.version, "")
            self.registry.lane_answered(lane_id, message.key, failure)

    @contextmanager
    def calibrator(self):
        yield self

    def probe(self, message, timeout_s, progress):
        return SIGNATURE, self.calibration


def write_version(folder, version, value=0.0):
    """Weights that are all `value`."""
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    tensors = {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}
    save_file(tensors, weights_of(folder, version))


def weights_of(folder, version):
    return folder / str(version) / "weights.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A model with version 1."""
    found = tmp_path / "models" / "m"
    write_version(found, 1, 1.0)
    (found / "model.py").write_text(CODE)
    (found / "config.toml").write_text(CONFIG)
    return found


@pytest.fixture
def lanes():
    return Lanes(_calibration.__wrapped__())


@pytest.fixture
def registry(tmp_path, folder, lanes):
    found = make_registry(tmp_path, folder, lanes)
    yield found
    found.close()


def make_registry(tmp_path, folder, lanes, budget_bytes=1 << 20):
    found = Registry(
        folder.parent,
        CalibrationCache(tmp_path / "cache"),
        lanes,
        executor="eager",
        qos_factor=2.0,
        calibration_s=1.0,
        start_timeout_s=PATIENCE_S,
        budget_bytes=budget_bytes,
        budget_changed=lambda weights_bytes: None,
        lock=threading.Lock(),
    )
    lanes.registry = found
    for lane_id in range(LANES):
        found.lane_up(LaneId(lane_id))
    return found


def told(registry):
    """(version, state, reason) of every version."""
    return [(info.version, info.state, info.reason) for info in registry.infos()]


def half_copied(folder, version):
    write_version(folder, version, float(version))
    path = weights_of(folder, version)
    path.write_bytes(path.read_bytes()[:-8])


# -- versions -----------------------------------------------------------------------------------


def test_the_newest_version_that_loads_is_the_default(folder, registry, caplog):
    write_version(folder, 2, 2.0)
    half_copied(folder, 3)
    with pytest.raises(ConfigError, match="version 3 of model 'm' does not load, version 2 serves"):
        registry.load("m")
    assert registry.get("m").spec.version == 2
    assert registry.get("m", "1").spec.version == 1
    with pytest.raises(NotReady, match=r"version 3 of model 'm' is UNAVAILABLE: .*truncated"):
        registry.get("m", "3")
    (one, two, three) = told(registry)
    assert [one[:2], two[:2], three[:2]] == [
        ("1", "READY"),
        ("2", "READY"),
        ("3", "UNAVAILABLE"),
    ]
    assert "3/weights.safetensors: truncated" in three[2]
    assert "3/weights.safetensors: truncated" in caplog.text


@pytest.mark.parametrize("where", ["in the file", "in the lanes"])
def test_a_failed_load_leaves_what_served_and_a_mended_one_takes_over(
    folder, registry, lanes, where
):
    entry = registry.load("m")
    write_version(folder, 2, 2.0)
    if where == "in the file":
        half_copied(folder, 2)
    else:
        lanes.refused[2] = "no such luck"
    reason = "truncated" if where == "in the file" else "model m:2: does not load: no such luck"
    with pytest.raises((ConfigError, ModelError), match=reason):
        registry.load("m")
    assert registry.get("m") is entry
    assert [row[1] for row in told(registry)] == ["READY", "UNAVAILABLE"]
    assert reason in told(registry)[1][2]

    lanes.refused.clear()
    write_version(folder, 2, 2.0)
    assert registry.load("m").spec.version == 2
    assert [row[1:] for row in told(registry)] == [("READY", "")] * 2


def test_a_failed_load_lets_no_version_go(folder, registry):
    write_version(folder, 2, 2.0)
    entry = registry.load("m")
    shutil.rmtree(folder / "2")
    half_copied(folder, 3)
    with pytest.raises(ConfigError, match=r"version 3 .* version 2 serves"):
        registry.load("m")
    assert registry.get("m") is entry
    shutil.rmtree(folder / "3")
    assert registry.load("m").spec.version == 1
    with pytest.raises(UnknownName):
        registry.get("m", "2")


def test_a_folder_emptied_by_mistake_lets_no_version_go(folder, registry):
    entry = registry.load("m")
    shutil.rmtree(folder / "1")
    with pytest.raises(ConfigError, match="holds no version"):
        registry.load("m")
    assert registry.get("m") is entry


def test_an_older_version_that_does_not_load_is_told_and_stops_nothing(folder, registry, caplog):
    half_copied(folder, 1)
    write_version(folder, 2, 2.0)
    assert registry.load("m").spec.version == 2
    assert [row[1] for row in told(registry)] == ["UNAVAILABLE", "READY"]
    assert "1/weights.safetensors: truncated" in caplog.text
    with pytest.raises(NotReady, match="truncated"):
        registry.get("m", "1")


def test_a_version_that_was_broken_in_place_serves_as_it_was(folder, registry, lanes):
    entry = registry.load("m")
    half_copied(folder, 1)
    with pytest.raises(ConfigError, match="version 1 of model 'm' does not load, version 1 serves"):
        registry.load("m")
    assert registry.get("m") is entry
    ((_, state, reason),) = told(registry)
    assert state == "READY"
    assert "serves as it was" in reason
    assert "truncated" in reason


def test_without_a_version_that_loads_the_model_is_not_served(folder, registry):
    half_copied(folder, 1)
    with pytest.raises(ConfigError, match="truncated"):
        registry.load("m")
    with pytest.raises(NotReady, match=r"model 'm' is UNAVAILABLE: .*truncated"):
        registry.get("m")
    write_version(folder, 1)
    registry.load("m")
    registry.unload("m")
    assert told(registry) == [("1", "UNAVAILABLE", "unloaded")]


def test_without_a_process_to_calibrate_in_the_old_version_serves(
    folder, registry, lanes, monkeypatch
):
    entry = registry.load("m")
    write_version(folder, 2, 2.0)

    def probe(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(lanes, "probe", probe)
    before = copies_held()
    with pytest.raises(NotReady, match="model m:2: no process to calibrate it"):
        registry.load("m")
    assert registry.get("m") is entry
    assert copies_held() == before


def test_names_that_clients_make_up_are_not_logged(registry, caplog):
    with pytest.raises(UnknownName):
        registry.load("n" * 5000)
    assert caplog.text == ""


def test_room_is_given_to_the_newest_version_first(tmp_path, folder, lanes):
    write_version(folder, 2, 2.0)
    size_bytes = weights_of(folder, 1).stat().st_size
    registry = make_registry(tmp_path, folder, lanes, budget_bytes=size_bytes * 3 // 2)
    assert registry.load("m").spec.version == 2
    assert "device.memory_budget" in told(registry)[0][2]
    registry.close()


def test_a_version_that_serves_without_its_folder_is_told(folder, registry):
    write_version(folder, 10, 2.0)
    registry.load("m")
    shutil.rmtree(folder / "10")
    half_copied(folder, 2)
    assert [row[:2] for row in told(registry)] == [
        ("1", "READY"),
        ("2", "UNAVAILABLE"),
        ("10", "READY"),
    ]
    shutil.rmtree(folder)
    assert [row[:2] for row in told(registry)] == [("1", "READY"), ("10", "READY")]


def test_a_version_that_is_none_is_not_found_of_a_model_that_is_not_served(folder, registry):
    half_copied(folder, 1)
    with pytest.raises(ConfigError):
        registry.load("m")
    for version in ("9" * 5000, "2"):
        with pytest.raises((UnknownName, NotReady)) as caught:
            registry.get("m", version)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("version", ["9" * 5000, "١", "²", "01", "+1", "1 ", "2", "-1"])
def test_a_version_that_is_none_is_not_found(registry, version):
    registry.load("m")
    with pytest.raises(UnknownName, match="has no version") as caught:
        registry.get("m", version)
    assert len(str(caught.value)) < 300


# -- the files they are served from ---------------------------------------------------------------


def overwrite(path, data):
    """In place, as `cp` does."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


@pytest.mark.parametrize("change", ["other weights", "cut", "gone", "other code"])
def test_a_lane_that_starts_later_reads_what_was_loaded(folder, registry, lanes, change):
    registry.load("m")
    loaded = lanes.read[0, "m:1"]
    path = weights_of(folder, 1)
    assert loaded == (path.read_bytes(), CODE.encode())
    if change == "other weights":
        overwrite(path, bytes(reversed(path.read_bytes())))
    elif change == "cut":
        overwrite(path, path.read_bytes()[:20])
    elif change == "gone":
        shutil.rmtree(folder)
    else:
        overwrite(folder / "model.py", b"raise RuntimeError\n")
    registry.lane_lost(LaneId(0))
    lanes.read.clear()
    registry.lane_up(LaneId(0))
    assert lanes.read[0, "m:1"] == loaded


def test_what_is_loaded_again_is_read_again(folder, registry, lanes):
    first = registry.load("m")
    write_version(folder, 1, 5.0)
    second = registry.load("m")
    assert first.digest != second.digest
    assert lanes.read[1, "m:1"][0] == weights_of(folder, 1).read_bytes()


def copies_held():
    """Memory files of this process that hold models."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += "gnnserve-model" in str(entry.readlink())
        except OSError:
            continue  # the one that lists them
    return found


def test_no_copy_outlives_its_version(tmp_path, folder, registry, lanes):
    before = copies_held()
    registry.load("m")
    held = copies_held()
    assert held > before
    registry.load("m")
    assert copies_held() == held
    write_version(folder, 1, 5.0)
    registry.load("m")  # in place of the old one
    assert copies_held() == held
    write_version(folder, 2, 2.0)
    lanes.refused[2] = "no"
    with pytest.raises(ModelError):
        registry.load("m")
    assert copies_held() == held
    registry.unload("m")
    assert copies_held() == before
    lanes.refused.clear()
    registry.load("m")
    registry.close()
    assert copies_held() == before


# -- copies by themselves ---------------------------------------------------------------------


@pytest.fixture
def spec(folder) -> ModelSpec:
    return find(folder.parent, "m")


def test_a_model_loads_from_copies_as_from_its_files(folder, spec):
    own = SealedCopies(spec)
    expected = {name: value.clone() for name, value in load_model(spec).module.named_parameters()}
    overwrite(weights_of(folder, 1), b"")
    overwrite(folder / "model.py", b"raise RuntimeError\n")
    loaded = load_model(own.spec).module
    own.close()
    for name, value in loaded.named_parameters():
        assert torch.equal(value, expected[name])


def test_copies_cannot_be_written_to(spec):
    own = SealedCopies(spec)
    try:
        for place in (own.spec.copied_weights, own.spec.copied_source):
            fd = os.open(place, os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    os.pwrite(fd, b"x", 0)
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, 0)
            finally:
                os.close(fd)
    finally:
        own.close()


@pytest.mark.parametrize("size", ["the same", "shorter"])
def test_a_file_that_is_written_to_while_it_is_copied_is_refused(folder, spec, monkeypatch, size):
    path = weights_of(folder, 1)
    sendfile = os.sendfile

    def interrupted(*arguments):
        data = path.read_bytes()
        overwrite(path, data if size == "the same" else data[:-4])
        os.utime(path, ns=(0, 0))
        return sendfile(*arguments)

    monkeypatch.setattr(sealed_copies.os, "sendfile", interrupted)
    before = copies_held()
    with pytest.raises(NotReady, match=r"weights\.safetensors: was written to while it was read"):
        SealedCopies(spec)
    assert copies_held() == before


def test_without_memory_for_a_copy_the_version_is_refused(spec, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed_copies.os, "sendfile", full)
    before = copies_held()
    with pytest.raises(NotReady, match="cannot be copied: No space left on device"):
        SealedCopies(spec)
    assert copies_held() == before
