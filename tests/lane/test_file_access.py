"""Rules for files, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve.lane.file_access import beside
from tests.processes import PATIENCE_S

LIMIT = """
import ctypes, os, sys
from serve.lane.file_access import limit_files
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
assert limit_files({hidden!r}, {writable!r}) == ""
{then}
"""


@pytest.fixture
def tree(tmp_path):
    for name in ("a/b/hidden", "a/b/seen", "a/seen", "c/seen", "w/seen"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    return tmp_path


def limited(tree, then: str, hidden=("a/b/hidden",), writable=("w",)) -> str:
    """Return what the statements print, or the last line of their error."""
    code = LIMIT.format(
        hidden=[str(tree / one) for one in hidden],
        writable=[str(tree / one) for one in writable],
        then=then,
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tree,
    )  # fmt: skip
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("hidden", ["a/b/hidden", "a/b", "a", "link/b"])
@pytest.mark.parametrize("path", ["a/b/hidden", "link/b/hidden"])
def test_a_hidden_file_is_not_read(tree, hidden, path):
    assert limited(tree, f"open('{path}')", hidden=(hidden,)).startswith("PermissionError")
    told = limited(tree, f"print(os.system('cat {path} 2>/dev/null'))", hidden=(hidden,))
    assert told == "256"


@pytest.mark.parametrize("path", ["a/b/seen", "a/seen", "c/seen", "link/seen", "w/seen"])
def test_what_lies_beside_is_read_and_not_written(tree, path):
    said = limited(tree, f"print(open('{path}').read())")
    assert said == (tree / path).read_text()
    if path != "w/seen":
        for deed in ("open({!r}, 'w')", "os.unlink({!r})", "os.truncate({!r}, 0)"):
            assert limited(tree, deed.format(path)).startswith("PermissionError"), deed
        assert (tree / path).read_text() == said


def test_a_writable_folder_takes_files_and_no_devices(tree):
    then = "open('w/x', 'w').write('1'); os.mkdir('w/d'); os.rename('w/x', 'w/d/x'); "
    assert limited(tree, then + "print(os.listdir('w/d'))") == "['x']"
    assert "Error" in limited(tree, "os.mknod('w/dev', 0o60600, os.makedev(7, 0))")


def test_devices_of_programs_are_there_and_others_are_not(tree):
    assert limited(tree, "print(len(open('/dev/urandom', 'rb').read(3)))") == "3"
    there = {path for path in os.listdir("/dev") if Path("/dev", path).is_block_device()}
    for name in (*there, "shm"):
        assert "PermissionError" in limited(tree, f"os.open('/dev/{name}', os.O_RDONLY)")


def test_other_processes_are_out_of_reach(tree):
    pid = os.getpid()
    for deed in (f"open('/proc/{pid}/mem', 'rb')", f"os.listdir('/proc/{pid}/cwd')"):
        assert limited(tree, deed).startswith("PermissionError")
    assert limited(tree, "child = os.fork() or os._exit(3); print(os.wait()[1])") == "768"


def test_a_file_that_is_hidden_and_not_there_hides_nothing_else(tree):
    said = limited(tree, "print(open('a/seen').read())", hidden=("a/none", "x/y/z"))
    assert said == "a/seen"


def test_beside_are_all_but_the_hidden_ones_and_what_holds_them(tree):
    found = {entry.path for entry in beside([str(tree / "a/b/hidden"), str(tree / "c")])}
    wanted = {str(tree / one) for one in ("a/b/seen", "a/seen", "w")}
    assert {one for one in found if one.startswith(f"{tree}/")} == wanted
    assert not {str(one) for one in (tree, *tree.parents)} & found
