"""Which versions are served, from which bytes, over lanes that load at once what they are told."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.core.types import LaneId
from serve.errors import ConfigError, ModelError, NotReady, RequestCancelled, UnknownName
from serve.ipc.messages import LoadModel
from serve.models.cache import CalibrationCache
from serve.server.calibrations import RolloutSettings
from serve.server.catalogue import ModelCatalogue
from serve.server.load_turns import LoadCancellation
from serve.server.model_info import ModelInfos
from serve.server.rollout import ModelRollout
from tests.estimate.conftest import SIGNATURE
from tests.estimate.conftest import calibration as _calibration

CODE = "import torch\n\n\ndef build():\n    return torch.nn.Linear(2, 2)\n"
CONFIG = '[model]\nfactory = "./model.py:build"\n'
LANES = 2


@dataclass
class Lanes:
    """Stands for a pool: each lane reads what it is told to load and answers."""

    calibration: object
    rollout: ModelRollout | None = None
    #: Versions that no lane and no calibrator can load, and why.
    refused: dict[int, str] = field(default_factory=dict)
    #: (weights, code) that each lane read last, by model and version.
    read: dict[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    #: Lanes of trust domains are for test_isolation.py.
    runs = False
    calibrators: object = field(default_factory=lambda: SimpleNamespace(interrupted=False))

    def domain_of(self, lane_id):
        return ""

    def send(self, lane_id, message):
        if isinstance(message, LoadModel):
            spec = message.spec
            source = Path(spec.copied_source or spec.source_file)
            self.read[lane_id, spec.key] = spec.weights_file.read_bytes(), source.read_bytes()
            failure = self.refused.get(spec.version, "")
            self.rollout.lane_models.answered(lane_id, message.key, failure)

    @contextmanager
    def calibrator(self, domain, writable, *, yields=False):
        yield self

    def probe(self, message, timeout_s, progress):
        return SIGNATURE, self.calibration

    def kill(self):
        pass


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
def models(tmp_path, folder, lanes):
    found = make_models(tmp_path, folder, lanes)
    yield found
    found.rollout.close()


class Models:
    """A catalogue of one folder, its rollout to lanes that are up, and its descriptions."""

    def __init__(self, root, cache, lanes, budget_bytes):
        self.catalogue = ModelCatalogue(root, qos_factor=2.0)
        settings = RolloutSettings("eager", 1.0, PATIENCE_S, budget_bytes)
        self.rollout = lanes.rollout = ModelRollout(
            self.catalogue,
            cache,
            lanes,
            settings,
            budget_changed=lambda weights_bytes: None,
            tell=lambda event: None,
            lock=threading.Lock(),
        )
        self.load, self.unload = self.rollout.load, self.rollout.unload
        self.get = self.catalogue.get
        self.infos = ModelInfos(self.catalogue)

    def told(self):
        """(version, state, reason) of every version."""
        return [(info.version, info.state, info.reason) for info in self.infos.all()]


def make_models(tmp_path, folder, lanes, budget_bytes=1 << 20):
    cache = CalibrationCache(tmp_path / "cache")
    found = Models(folder.parent, cache, lanes, budget_bytes)
    for lane_id in range(LANES):
        found.rollout.lane_models.lane_up(LaneId(lane_id))
    return found


def half_copied(folder, version):
    write_version(folder, version, float(version))
    path = weights_of(folder, version)
    path.write_bytes(path.read_bytes()[:-8])


# -- versions -----------------------------------------------------------------------------------


def test_the_newest_version_that_loads_is_the_default(folder, models, caplog):
    write_version(folder, 2, 2.0)
    half_copied(folder, 3)
    with pytest.raises(ConfigError, match="version 3 of model 'm' does not load, version 2 serves"):
        models.load("m")
    assert models.get("m").spec.version == 2
    assert models.get("m", "1").spec.version == 1
    with pytest.raises(NotReady, match=r"version 3 of model 'm' is UNAVAILABLE: .*truncated"):
        models.get("m", "3")
    (one, two, three) = models.told()
    assert [one[:2], two[:2], three[:2]] == [
        ("1", "READY"),
        ("2", "READY"),
        ("3", "UNAVAILABLE"),
    ]
    assert "3/weights.safetensors: truncated" in three[2]
    assert "3/weights.safetensors: truncated" in caplog.text


@pytest.mark.parametrize("where", ["in the file", "in the lanes"])
def test_a_failed_load_leaves_what_served_and_a_mended_one_takes_over(folder, models, lanes, where):
    entry = models.load("m")
    write_version(folder, 2, 2.0)
    if where == "in the file":
        half_copied(folder, 2)
    else:
        lanes.refused[2] = "no such luck"
    reason = "truncated" if where == "in the file" else "model m:2: does not load: no such luck"
    with pytest.raises((ConfigError, ModelError), match=reason):
        models.load("m")
    assert models.get("m") is entry
    assert [row[1] for row in models.told()] == ["READY", "UNAVAILABLE"]
    assert reason in models.told()[1][2]

    lanes.refused.clear()
    write_version(folder, 2, 2.0)
    assert models.load("m").spec.version == 2
    assert [row[1:] for row in models.told()] == [("READY", "")] * 2


def test_a_failed_load_lets_no_version_go(folder, models):
    write_version(folder, 2, 2.0)
    entry = models.load("m")
    shutil.rmtree(folder / "2")
    half_copied(folder, 3)
    with pytest.raises(ConfigError, match=r"version 3 .* version 2 serves"):
        models.load("m")
    assert models.get("m") is entry
    shutil.rmtree(folder / "3")
    assert models.load("m").spec.version == 1
    with pytest.raises(UnknownName):
        models.get("m", "2")


def test_a_folder_emptied_by_mistake_lets_no_version_go(folder, models):
    entry = models.load("m")
    shutil.rmtree(folder / "1")
    with pytest.raises(ConfigError, match="holds no version"):
        models.load("m")
    assert models.get("m") is entry


def test_an_older_version_that_does_not_load_is_told_and_stops_nothing(folder, models, caplog):
    half_copied(folder, 1)
    write_version(folder, 2, 2.0)
    assert models.load("m").spec.version == 2
    assert [row[1] for row in models.told()] == ["UNAVAILABLE", "READY"]
    assert "1/weights.safetensors: truncated" in caplog.text
    with pytest.raises(NotReady, match="truncated"):
        models.get("m", "1")


def test_a_version_that_was_broken_in_place_serves_as_it_was(folder, models, lanes):
    entry = models.load("m")
    half_copied(folder, 1)
    with pytest.raises(ConfigError, match="version 1 of model 'm' does not load, version 1 serves"):
        models.load("m")
    assert models.get("m") is entry
    ((_, state, reason),) = models.told()
    assert state == "READY"
    assert "serves as it was" in reason
    assert "truncated" in reason


def test_without_a_version_that_loads_the_model_is_not_served(folder, models):
    half_copied(folder, 1)
    with pytest.raises(ConfigError, match="truncated"):
        models.load("m")
    with pytest.raises(NotReady, match=r"model 'm' is UNAVAILABLE: .*truncated"):
        models.get("m")
    write_version(folder, 1)
    models.load("m")
    models.unload("m")
    assert models.told() == [("1", "UNAVAILABLE", "unloaded")]


def test_without_a_process_to_calibrate_in_the_old_version_serves(
    folder, models, lanes, monkeypatch
):
    entry = models.load("m")
    write_version(folder, 2, 2.0)

    def probe(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(lanes, "probe", probe)
    before = copies_held()
    with pytest.raises(NotReady, match="model m:2: no process to calibrate it"):
        models.load("m")
    assert models.get("m") is entry
    assert copies_held() == before


def test_names_that_clients_make_up_are_not_logged(models, caplog):
    with pytest.raises(UnknownName):
        models.load("n" * 5000)
    assert caplog.text == ""


def test_room_is_given_to_the_newest_version_first(tmp_path, folder, lanes):
    write_version(folder, 2, 2.0)
    size_bytes = weights_of(folder, 1).stat().st_size
    models = make_models(tmp_path, folder, lanes, budget_bytes=size_bytes * 3 // 2)
    assert models.load("m").spec.version == 2
    assert "device.memory_budget" in models.told()[0][2]
    models.rollout.close()


def test_a_version_that_serves_without_its_folder_is_told(folder, models):
    write_version(folder, 10, 2.0)
    models.load("m")
    shutil.rmtree(folder / "10")
    half_copied(folder, 2)
    assert [row[:2] for row in models.told()] == [
        ("1", "READY"),
        ("2", "UNAVAILABLE"),
        ("10", "READY"),
    ]
    assert [row[2].startswith("its folder is gone") for row in models.told()] == [
        False,
        False,
        True,
    ]
    shutil.rmtree(folder)
    assert [row[:2] for row in models.told()] == [("1", "READY"), ("10", "READY")]
    assert all(row[2].startswith("its folder is gone") for row in models.told())


def test_a_version_that_is_none_is_not_found_of_a_model_that_is_not_served(folder, models):
    half_copied(folder, 1)
    with pytest.raises(ConfigError):
        models.load("m")
    for version in ("9" * 5000, "2"):
        with pytest.raises((UnknownName, NotReady)) as caught:
            models.get("m", version)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("version", ["9" * 5000, "١", "²", "01", "+1", "1 ", "2", "-1"])
def test_a_version_that_is_none_is_not_found(models, version):
    models.load("m")
    with pytest.raises(UnknownName, match="has no version") as caught:
        models.get("m", version)
    assert len(str(caught.value)) < 300


# -- the files they are served from ---------------------------------------------------------------


def overwrite(path, data):
    """In place, as `cp` does."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


@pytest.mark.parametrize("change", ["other weights", "cut", "gone", "other code"])
def test_a_lane_that_starts_later_reads_what_was_loaded(folder, models, lanes, change):
    models.load("m")
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
    models.rollout.lane_models.lane_lost(LaneId(0))
    lanes.read.clear()
    models.rollout.lane_models.lane_up(LaneId(0))
    assert lanes.read[0, "m:1"] == loaded


def test_what_is_loaded_again_is_read_again(folder, models, lanes):
    first = models.load("m")
    write_version(folder, 1, 5.0)
    second = models.load("m")
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


def test_no_copy_outlives_its_version(tmp_path, folder, models, lanes):
    before = copies_held()
    models.load("m")
    held = copies_held()
    assert held > before
    models.load("m")
    assert copies_held() == held
    write_version(folder, 1, 5.0)
    models.load("m")  # in place of the old one
    assert copies_held() == held
    write_version(folder, 2, 2.0)
    lanes.refused[2] = "no"
    with pytest.raises(ModelError):
        models.load("m")
    assert copies_held() == held
    models.unload("m")
    assert copies_held() == before
    lanes.refused.clear()
    models.load("m")
    models.rollout.close()
    assert copies_held() == before


@pytest.mark.parametrize("again", [False, True], ids=["unloaded", "loaded again"])
def test_memory_is_given_back_when_the_last_request_ends_late(folder, models, monkeypatch, again):
    monkeypatch.setattr("serve.server.rollout._DRAIN_TIMEOUT_S", 0.01)
    before = copies_held()
    entry = models.load("m")
    held, weights_bytes = copies_held(), models.rollout.weights_bytes
    entry.inflight = 1
    models.unload("m")
    assert models.rollout.weights_bytes == weights_bytes > 0
    if again:
        successor = models.load("m")
        assert successor.key == entry.key
    entry.inflight = 0
    entry.idle.set()
    if again:
        wait_for(lambda: copies_held() == held, "the end of the first files")
        assert models.rollout.weights_bytes == weights_bytes
        assert models.catalogue.by_key(entry.key) is successor
    else:
        wait_for(lambda: models.rollout.weights_bytes == 0, "its memory")
        wait_for(lambda: copies_held() == before, "the end of its files")


# -- several at once ------------------------------------------------------------------------------


@pytest.fixture
def other(folder):
    """A second model beside the first."""
    shutil.copytree(folder, folder.parent / "other")
    return "other"


class Hanging:
    """In place of the pool's calibrators: one in which a model hangs until it is killed."""

    def __init__(self, lanes, monkeypatch, name="m"):
        self.began, self.killed = threading.Event(), threading.Event()
        self.measured = []
        self._lanes, self._name = lanes, name
        monkeypatch.setattr(lanes, "calibrator", self.calibrator)

    @contextmanager
    def calibrator(self, domain, writable, *, yields=False):
        yield self

    def kill(self):
        self.killed.set()

    def probe(self, message, timeout_s, progress):
        self.measured.append(message.spec.name)
        if message.spec.name == self._name:
            self.began.set()
            assert self.killed.wait(PATIENCE_S)
            raise NotReady("the process that loaded the model died; see the log")
        return SIGNATURE, self._lanes.calibration


def patient(models, silence_s):
    """Set the time after which a measurement that tells nothing is passed over."""
    models.rollout._turns._silence_s = silence_s


def test_a_load_that_hangs_does_not_hold_up_another_model(models, lanes, other, monkeypatch):
    hanging = Hanging(lanes, monkeypatch)
    patient(models, 0.01)
    cancellation = LoadCancellation()
    with ThreadPoolExecutor(1) as threads:
        hangs = threads.submit(models.load, "m", None, cancellation)
        assert hanging.began.wait(PATIENCE_S)
        assert models.load(other).spec.name == other
        models.unload(other)
        assert not hangs.done()
        cancellation.cancel()
        with pytest.raises(RequestCancelled):
            hangs.result()


def test_models_that_are_measured_well_are_so_one_after_the_other(
    models, lanes, other, monkeypatch
):
    hanging = Hanging(lanes, monkeypatch)
    patient(models, PATIENCE_S)
    waits = threading.Event()
    until_silent_s = models.rollout._turns._until_silent_s

    def watched():
        if (found := until_silent_s()) > 0:
            waits.set()
        return found

    monkeypatch.setattr(models.rollout._turns, "_until_silent_s", watched)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(models.load, "m")
        assert hanging.began.wait(PATIENCE_S)
        second = threads.submit(models.load, other)
        assert waits.wait(PATIENCE_S)
        assert hanging.measured == ["m"]
        hanging.kill()
        with pytest.raises(NotReady, match="died"):
            first.result()
        assert second.result().spec.name == other
    assert hanging.measured == ["m", other]


@pytest.mark.parametrize("served", [False, True], ids=["new", "served"])
def test_a_load_ends_with_its_client_and_leaves_what_served(
    folder, models, lanes, monkeypatch, served
):
    entry = models.load("m") if served else None
    write_version(folder, 2, 2.0)
    before = copies_held()
    hanging = Hanging(lanes, monkeypatch)
    cancellation = LoadCancellation()
    with ThreadPoolExecutor(2) as threads:
        load = threads.submit(models.load, "m", None, cancellation)
        assert hanging.began.wait(PATIENCE_S)
        # Its second client waits for its turn, and goes too.
        another = LoadCancellation()
        second = threads.submit(models.load, "m", None, another)
        another.cancel()
        with pytest.raises(RequestCancelled):
            second.result()
        assert not load.done()
        cancellation.cancel()
        with pytest.raises(RequestCancelled, match="cancelled by its client"):
            load.result()
    assert hanging.killed.is_set()
    assert copies_held() == before
    if served:
        assert models.get("m") is entry
        assert models.told()[0] == ("1", "READY", "")
    else:
        with pytest.raises(NotReady, match="UNAVAILABLE: the load was cancelled"):
            models.get("m")
    monkeypatch.undo()
    assert models.load("m").spec.version == 2


def test_a_load_that_waits_for_lanes_ends_with_its_client(models, lanes, monkeypatch):
    sent = threading.Event()
    monkeypatch.setattr(lanes, "send", lambda lane_id, message: sent.set())
    cancellation = LoadCancellation()
    with ThreadPoolExecutor(1) as threads:
        load = threads.submit(models.load, "m", None, cancellation)
        assert sent.wait(PATIENCE_S)
        cancellation.cancel()
        with pytest.raises(RequestCancelled):
            load.result()
    assert models.rollout.weights_bytes == 0


def test_a_stop_ends_loads_that_wait_for_their_turn(models, lanes, other, monkeypatch):
    hanging = Hanging(lanes, monkeypatch)
    patient(models, PATIENCE_S)
    with ThreadPoolExecutor(3) as threads:
        loads = [threads.submit(models.load, "m")]
        assert hanging.began.wait(PATIENCE_S)
        loads += [threads.submit(models.load, name) for name in ("m", other)]
        lanes.calibrators.interrupted = True
        models.rollout.interrupt()
        for waits in loads[1:]:
            with pytest.raises(NotReady, match="stops"):
                waits.result()
        hanging.kill()
        with pytest.raises(NotReady):
            loads[0].result()


def test_models_that_load_at_once_share_the_memory(tmp_path, folder, lanes, other, monkeypatch):
    size_bytes = weights_of(folder, 1).stat().st_size
    models = make_models(tmp_path, folder, lanes, budget_bytes=size_bytes * 3 // 2)
    patient(models, 0.01)
    hanging = Hanging(lanes, monkeypatch)
    cancellation = LoadCancellation()
    with ThreadPoolExecutor(1) as threads:
        load = threads.submit(models.load, "m", None, cancellation)
        assert hanging.began.wait(PATIENCE_S)
        with pytest.raises(NotReady, match=r"device\.memory_budget"):
            models.load(other)
        cancellation.cancel()
        with pytest.raises(RequestCancelled):
            load.result()
    assert models.load(other).spec.name == other
    models.rollout.close()


# -- what clients are told ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["weights", "config", "code", "link"])
def test_clients_are_told_paths_in_the_repository_and_the_log_has_them_in_full(
    folder, models, tmp_path, caplog, fault
):
    if fault == "weights":
        half_copied(folder, 1)
    elif fault == "config":
        (folder / "config.toml").write_text("[model\n")
    elif fault == "code":
        (folder / "model.py").unlink()
    else:
        half_copied(folder, 1)
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((ConfigError, NotReady)) as caught:
        models.load("m")
    with pytest.raises(NotReady) as refused:
        models.get("m")
    told = [str(caught.value), str(refused.value), *(reason for *_, reason in models.told())]
    for text in told:
        assert str(tmp_path) not in text
    assert "m/" in told[0]
    assert f"{folder}/" in caplog.text
