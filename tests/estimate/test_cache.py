import logging
from pathlib import Path

import msgspec
import pytest

from serve.models import cache as cache_module
from serve.models.cache import CalibrationCache
from serve.models.facts import Signature

SIGNATURE = Signature(
    num_features=32,
    edge_dim=None,
    num_outputs=7,
    rows="node",
    accepts_empty=True,
    accepts_edgeless=True,
    deterministic=True,
)


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
