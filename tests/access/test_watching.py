"""Files of several kinds are followed by one thread, each change heard once."""

import threading
from collections import Counter

import pytest

from bench.kit.waiting import wait_for
from serve.access.watching import FileWatcher, WatchedFiles


@pytest.fixture
def heard():
    return Counter()


def replaced(path, text):
    """Write the file anew, as another inode."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


def test_each_change_is_heard_once_and_a_missing_file_is_waited_for(tmp_path, heard):
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.write_text("old")
    files = WatchedFiles((one, other), lambda: heard.update(["changed"]))
    files.look()
    assert not heard
    replaced(one, "newer")
    files.look()
    files.look()
    assert heard == {"changed": 1}
    other.unlink()
    files.look()
    assert heard == {"changed": 1}
    other.write_text("back again")
    files.look()
    assert heard == {"changed": 2}


def test_one_thread_follows_all_and_outlives_what_fails(tmp_path, heard, caplog):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.write_text("old")

    def broken():
        heard["first"] += 1
        raise ValueError("a bug")

    watcher = FileWatcher(
        WatchedFiles((first,), broken),
        WatchedFiles((second,), lambda: heard.update(["second"])),
        period_s=0.01,
    )
    before = threading.active_count()
    watcher.start()
    try:
        assert threading.active_count() == before + 1
        replaced(first, "newer")
        wait_for(lambda: heard["first"], "the first file")
        replaced(second, "newer")
        wait_for(lambda: heard["second"], "the second file")
        replaced(first, "newest")
        wait_for(lambda: heard["first"] == 2, "the first file again")
    finally:
        watcher.stop()
    assert threading.active_count() == before
    assert "could not be read" in caplog.text


def test_without_files_there_is_no_thread():
    before = threading.active_count()
    watcher = FileWatcher()
    watcher.start()
    assert threading.active_count() == before
    watcher.stop()
