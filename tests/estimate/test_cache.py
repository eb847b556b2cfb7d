import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from serve.errors import ConfigError
from serve.estimate.calibration import FORMAT, Calibration
from serve.models import cache as cache_module
from serve.models.cache import CalibrationCache, require_own
from serve.models.cache_pruning import hold, prune
from tests.estimate.conftest import SIGNATURE


@pytest.fixture
def cache(tmp_path):
    return CalibrationCache(tmp_path / "deep" / "cache")


def test_what_was_put_is_got_by_another_process(cache, tmp_path, calibration):
    assert cache.get("abc") is None
    cache.put("abc", SIGNATURE, calibration)
    assert CalibrationCache(tmp_path / "deep" / "cache").get("abc") == (SIGNATURE, calibration)
    assert cache.get("abd") is None


def test_another_executor_device_thread_count_allocator_or_version_is_another_key(
    cache, tmp_path, calibration, monkeypatch
):
    folder = tmp_path / "deep" / "cache"
    cache.put("abc", SIGNATURE, calibration)
    assert CalibrationCache(folder, threads=2).get("abc") is None
    assert CalibrationCache(folder, executor="csr").get("abc") is None
    assert CalibrationCache(folder, device="cuda").get("abc") is None
    assert CalibrationCache(folder, budget_s=1.0).get("abc") is None
    assert CalibrationCache(folder, allocator=("MALLOC_MMAP_MAX_=0",)).get("abc") is None
    assert CalibrationCache(folder, compiles=True).get("abc") is None
    monkeypatch.setattr(cache_module, "_versions", lambda: ["torch 99"])
    assert CalibrationCache(folder).get("abc") is None


def test_a_change_of_what_is_stored_has_a_new_format():
    """Without one, what an older version never measured would be read as 0 or empty.

    Whoever changes the fields raises ``FORMAT``, and changes both here.
    """
    fields = (
        "format model executor device threads memory time executor_reason replay_most load_ns "
        "busy_share replay_any_size gather_threads replay_reason"
    )
    assert (FORMAT, " ".join(Calibration.__struct_fields__)) == (18, fields)


def test_a_new_calibration_replaces_the_old_and_leaves_nothing_else(cache, tmp_path, calibration):
    cache.put("abc", SIGNATURE, calibration)
    cache.put("abc", SIGNATURE, calibration)
    assert len(list((tmp_path / "deep" / "cache").iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b'{"signature": 3', b"\xff\xfe\x00garbage"])
def test_a_corrupt_file_is_ignored_with_a_warning(cache, tmp_path, calibration, caplog, content):
    cache.put("abc", SIGNATURE, calibration)
    (path,) = (tmp_path / "deep" / "cache").iterdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.get("abc") is None
    assert str(path) in caplog.text
    cache.put("abc", SIGNATURE, calibration)
    assert cache.get("abc") == (SIGNATURE, calibration)


def test_a_folder_that_cannot_be_used_costs_a_warning_only(tmp_path, calibration, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = CalibrationCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        cache.put("abc", SIGNATURE, calibration)
        assert cache.get("abc") is None
    assert "cannot be kept" in caplog.text


def test_a_compiled_model_is_kept_with_its_code(tmp_path, calibration):
    assert CalibrationCache(tmp_path).package("abc") == ""
    cache = CalibrationCache(tmp_path, compiles=True)
    package = Path(cache.package("abc"))
    cache.put("abc", SIGNATURE, msgspec.structs.replace(calibration, executor="csr_compiled"))
    assert cache.get("abc") is None
    (package / "deep").mkdir(parents=True)
    (package / "deep" / "model.so").write_bytes(b"12345")
    (package / "deep" / "model.cpp").write_bytes(b"not mapped")
    assert cache.get("abc")[1].executor == "csr_compiled"
    assert cache.package_bytes("abc") == 5


def made(folder, name, kib, age_h):
    """A file, or a folder with one, that was used so many hours ago."""
    path = folder / name
    file = path
    if path.suffix == ".compiled":
        path.mkdir()
        file = path / "model.so"
    file.write_bytes(os.urandom(kib * 1024))
    used_s = time.time() - 3600 * age_h
    os.utime(file, (used_s, used_s))
    os.utime(path, (used_s, used_s))
    return path


def test_what_was_used_least_recently_goes_first_until_the_rest_fits(tmp_path):
    old = made(tmp_path, "old.compiled", 64, age_h=9)
    older = made(tmp_path, "older.json", 16, age_h=10)
    used = made(tmp_path, "used.compiled", 64, age_h=2)
    sizes = 64 + 16 + 64
    assert prune(tmp_path.iterdir(), (sizes + 64) << 10) == 0
    assert prune(tmp_path.iterdir(), 100 << 10) >= 80 << 10
    assert (old.exists(), older.exists(), used.exists()) == (False, False, True)


def test_what_another_process_may_be_writing_stays(tmp_path):
    path = made(tmp_path, "new.json", 64, age_h=0)
    assert prune(tmp_path.iterdir(), 1) == 0
    assert path.exists()


def test_what_a_running_process_holds_stays_until_it_ends(tmp_path):
    path = made(tmp_path, "held.compiled", 64, age_h=9)
    code = "import sys; from pathlib import Path; from serve.models.cache_pruning import hold;"
    code += "print(hold(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "True\n"
        assert prune(tmp_path.iterdir(), 1) == 0
        assert path.exists()
        holder.kill()
        holder.wait()
    assert prune(tmp_path.iterdir(), 1) >= 64 << 10
    assert not path.exists()
    assert not hold(path)


def test_a_new_calibration_makes_room_for_itself_and_one_that_is_used_stays(tmp_path, calibration):
    def cache(limit_bytes):
        return CalibrationCache(tmp_path, limit_bytes=limit_bytes)

    cache(1 << 30).put("abc", SIGNATURE, calibration)
    (kept,) = tmp_path.iterdir()
    long_ago_s = time.time() - 9 * 3600
    other = made(tmp_path, "other.compiled", 64, age_h=8)
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    os.utime(kept, (long_ago_s, long_ago_s))
    os.utime(graphs, (long_ago_s, long_ago_s))
    assert cache(1 << 30).get("abc") is not None
    cache(32 << 10).put("abd", SIGNATURE, calibration)
    assert (kept.exists(), other.exists(), graphs.exists()) == (True, False, True)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*only its owner may write.*chmod go-w"):
        require_own(tmp_path)
    tmp_path.chmod(mode & ~0o022)
    require_own(tmp_path)


def test_a_folder_of_another_user_is_refused_by_name(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(tmp_path, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    owner, us = tmp_path.stat().st_uid, os.geteuid()
    with pytest.raises(ConfigError, match=f"{tmp_path} belongs to user {owner}.*as user {us}"):
        require_own(tmp_path)


def test_a_new_folder_is_the_server_s_alone(cache, tmp_path, calibration):
    require_own(tmp_path / "deep" / "cache")
    cache.put("abc", SIGNATURE, calibration)
    assert (tmp_path / "deep" / "cache").stat().st_mode & 0o777 == 0o700
