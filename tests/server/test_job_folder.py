"""A training job on disk: what the model's code leaves there harms nobody."""

import os

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from serve.server.training.job_folder import JobFolder, KeptJob, kept_jobs

SECRET = b"only the server reads this"


def job(number=1, **fields):
    given = {"model": "gcn", "base_version": 1, "graph": "g", "epochs": 3, "learning_rate": 0.1}
    given |= {"seed": 0, "fresh": True, "priority": 0}
    return KeptJob(job_id=number, **given | fields)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "jobs"


@pytest.fixture
def folder(root):
    found = JobFolder(root / "1")
    found.keep(job())
    return found


def leave(path, kind, secret):
    """Have a link, a pipe or a folder there, as code of a model may."""
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_published(folder, tmp_path, kind):
    """A link to what only the server may read would be copied to where the model may."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    leave(folder.shared / "weights.safetensors", kind, secret)
    model = tmp_path / "models" / "gcn"
    model.mkdir(parents=True)
    with pytest.raises(OSError, match="no regular file"):
        folder.publish(model, 2, lambda: True)
    assert list(model.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_checkpoint_that_is_no_file_counts_as_none(folder, tmp_path, kind):
    secret = tmp_path / "secret"
    save_file({"w": np.zeros(1, np.float32)}, secret, {"steps": "7"})
    leave(folder.shared / "checkpoint.safetensors", kind, secret)
    assert folder.steps_kept() == 0


def test_weights_are_published_whole_or_not_at_all(folder, tmp_path):
    (folder.shared / "weights.safetensors").write_bytes(b"weights")
    model = tmp_path / "gcn"
    model.mkdir()
    assert not folder.publish(model, 2, lambda: False)
    assert list(model.iterdir()) == []
    assert not folder.published_as(model, 2)
    assert folder.publish(model, 2, lambda: True)
    assert [path.name for path in model.iterdir()] == ["2"]
    assert (model / "2" / "weights.safetensors").read_bytes() == b"weights"
    assert folder.published_as(model, 2)
    # Somebody else's version stays as it is.
    (folder.shared / "weights.safetensors").write_bytes(b"others")
    assert not folder.published_as(model, 2)
    with pytest.raises(OSError, match="not empty"):
        folder.publish(model, 2, lambda: True)
    assert [path.name for path in model.iterdir()] == ["2"]
    assert (model / "2" / "weights.safetensors").read_bytes() == b"weights"


def test_processes_write_to_none_of_the_servers_own_files(folder):
    assert folder.shared.parent == folder.path
    assert list(folder.shared.iterdir()) == []
    assert (folder.path / "job.json").is_file()


def test_jobs_are_found_in_order_and_others_are_left_alone(root, folder, tmp_path, caplog):
    for number in (10, 2):
        JobFolder(root / str(number)).keep(job(number))
    JobFolder(root / "copy of 1").keep(job())
    JobFolder(root / "3").keep(job(7))
    (root / "notes").mkdir()
    (root / "file").touch()
    hostile = {
        "a": lambda path: os.mkfifo(path),
        "b": lambda path: path.write_bytes(b"\xff"),
        "c": lambda path: path.write_bytes(b'{"x": ' + b"[" * 60_000),
        "d": lambda path: path.write_bytes(b"x" * (1 << 20)),
        "e": lambda path: path.symlink_to("/dev/zero"),
        "f": lambda path: path.write_bytes(msgspec.json.encode({"job_id": 1})),
        "g": lambda path: path.mkdir(),
    }
    for name, make in hostile.items():
        (root / name).mkdir()
        make(root / name / "job.json")
    assert [found.job_id for _, found in kept_jobs(root)] == [1, 2, 10]
    for name in (*hostile, "copy of 1", "3"):
        assert str(root / name) in caplog.text


def test_an_ended_job_leaves_its_facts_alone(folder):
    deep = folder.shared
    for _ in range(20):
        deep = deep / "d"
    deep.mkdir(parents=True)
    folder.tidy()
    assert [path.name for path in folder.path.iterdir()] == ["job.json"]
    folder.remove()
    assert not folder.path.exists()


def test_no_jobs_are_found_where_there_is_no_folder(tmp_path):
    assert list(kept_jobs(tmp_path / "none")) == []
