"""What changed in the repository is loaded, at SIGHUP or by itself, one after the other."""

import os
import threading

import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.commands.rescan import RepositoryRescan
from serve.errors import NotReady


class Loads:
    """Notes the models that are loaded, and may hold a load up."""

    def __init__(self):
        self.names = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, name, cancellation):
        self.names.append(name)
        with cancellation.calling(self.go_on.set):
            assert self.go_on.wait(PATIENCE_S)
        cancellation.check()
        if name == "broken":
            raise NotReady("version 2 of model 'broken' does not load")


def write(root, model, version="1", text="weights"):
    folder = root / model / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.safetensors").write_text(text)


@pytest.fixture
def rescan(tmp_path):
    """What is looked for in a repository of models a and b, and what it loads."""
    loads = Loads()

    def make(*wanted, watched=False):
        write(tmp_path, "a")
        write(tmp_path, "b")
        found = RepositoryRescan(tmp_path, wanted, loads, watched=watched)
        found.look()
        made.append(found)
        return found, loads

    made = []
    yield make
    for one in made:
        one.stop()


def ended(rescan):
    wait_for(lambda: rescan._thread is None, "the rescan to end")


def test_nothing_changed_and_nothing_is_loaded(rescan, tmp_path):
    found, loads = rescan()
    (tmp_path / "a" / "versions.toml").write_text("as the server writes it")
    (tmp_path / "a" / ".import-x").mkdir()
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "model.pyc").touch()
    found.begin()
    ended(found)
    assert loads.names == []


def test_new_models_versions_and_files_are_loaded_once(rescan, tmp_path):
    found, loads = rescan()
    write(tmp_path, "new")
    write(tmp_path, "b", "2")
    found.begin()
    ended(found)
    assert loads.names == ["b", "new"]
    # A version that was copied by half, and is whole now.
    write(tmp_path, "b", "2", "all of the weights")
    os.rename(tmp_path / "new", tmp_path / ".gone")
    found.begin()
    ended(found)
    assert loads.names == ["b", "new", "b"]


def test_only_the_models_that_are_to_be_served(rescan, tmp_path):
    found, loads = rescan("a")
    write(tmp_path, "a", "2")
    write(tmp_path, "b", "2")
    found.begin()
    ended(found)
    assert loads.names == ["a"]


def test_a_model_that_does_not_load_is_told_and_keeps_no_other(rescan, tmp_path, caplog):
    found, loads = rescan()
    for name in ("broken", "c"):
        write(tmp_path, name)
    found.begin()
    ended(found)
    assert loads.names == ["broken", "c"]
    assert "model broken changed in the repository: version 2" in caplog.text


def test_a_signal_while_it_loads_is_not_lost_and_a_stop_ends_it(rescan, tmp_path):
    found, loads = rescan()
    loads.go_on.clear()
    write(tmp_path, "c")
    found.begin()
    wait_for(lambda: loads.names, "the load")
    write(tmp_path, "d")
    found.begin()
    loads.go_on.set()
    ended(found)
    assert loads.names == ["c", "d"]
    loads.go_on.clear()
    write(tmp_path, "e")
    write(tmp_path, "f")
    found.begin()
    wait_for(lambda: "e" in loads.names, "the next load")
    found.stop()
    ended(found)
    assert loads.names == ["c", "d", "e"]
    found.begin()
    assert found._thread is None


def test_after_a_look_for_which_there_was_no_thread_another_can_be_had(
    rescan, tmp_path, monkeypatch
):
    found, loads = rescan()
    write(tmp_path, "a", "2")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: [][0])
        with pytest.raises(IndexError):
            found.begin()
    found.begin()
    ended(found)
    assert loads.names == ["a"]


def test_a_watched_repository_is_loaded_once_its_files_stay_the_same(rescan, tmp_path):
    found, loads = rescan(watched=True)
    looks = Looks()
    found._stopped.wait = looks
    found.watch()
    assert looks.here.acquire(timeout=PATIENCE_S)
    looks.next()
    write(tmp_path, "a", "2", "half")
    looks.next()
    write(tmp_path, "a", "2", "half of it, and more")
    looks.next()
    assert loads.names == []
    looks.next()
    wait_for(lambda: loads.names == ["a"], "the load of what is whole")
    ended(found)
    looks.next()
    looks.next()
    assert loads.names == ["a"]
    looks.end()


class Looks:
    """A watch's waits, each of which ends when the test says so."""

    def __init__(self):
        self.here, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False

    def __call__(self, period_s):
        self.here.release()
        assert self.go_on.acquire(timeout=PATIENCE_S)
        return self.ended

    def next(self):
        """Have one look made, and return after it."""
        self.go_on.release()
        assert self.here.acquire(timeout=PATIENCE_S)

    def end(self):
        """End the watch."""
        self.ended = True
        self.go_on.release()
