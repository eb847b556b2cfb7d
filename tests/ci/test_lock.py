"""The locks hold hashes of exactly what is pinned, and of all that is asked for."""

import importlib.util

import pytest

from bench.kit.result import ROOT

SPEC = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
lock = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lock)
DEV = ROOT / "locks" / "dev.txt"


@pytest.mark.parametrize("path", lock.LOCKS, ids=lambda path: path.name)
def test_the_locks_fit(path):
    assert lock.wrong(path, lock.LOCKS[path]) == []
    text = path.read_text()
    of_torch = path.name.startswith("torch")
    assert len(lock.blocks(text)) == len(lock.pins(text)) >= (1 if of_torch else 30)
    assert ("torch" in lock.pins(text)) == of_torch


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("msgspec==", "msgspec==9.", "is not what constraints.txt says"),
        ("msgspec==", "other==", "it has no msgspec>="),
        ("msgspec==", None, "has no hash"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, old, new, said):
    text = DEV.read_text()
    (block,) = [block for block in lock.blocks(text) if block.startswith(old)]
    changed = block.split(" ")[0] + "\n" if new is None else block.replace(old, new)
    path = tmp_path / "dev.txt"
    path.write_text(text.replace(block, changed))
    found = lock.wrong(path, lock.LOCKS[DEV])
    assert any(said in one for one in found), found


def test_a_lock_of_another_torch_is_told(tmp_path):
    path = ROOT / "locks" / "torch-cpu.txt"
    text = path.read_text()
    assert "+cpu" in text
    other = tmp_path / path.name
    other.write_text(text.replace("==2", "==1", 1))
    (said,) = lock.wrong(other, lock.LOCKS[path])
    assert "+cpu is not what constraints.txt says" in said


def test_extras_that_name_others_ask_for_theirs():
    names = {requirement.name for requirement in lock.required("dev")}
    assert {"numpy", "torch", "locust", "pytest", "ruff"} <= names
    assert "gnnserve" not in names
