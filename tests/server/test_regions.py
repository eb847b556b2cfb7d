"""Shared memory of clients: what may be registered, and parts that change or vanish."""

import os
import uuid
from multiprocessing import shared_memory

import numpy as np
import pytest

from serve.errors import InvalidInput, NameTaken, QueueFull, UnknownName, Unsupported
from serve.server import regions as module
from serve.server.regions import PIECE_BYTES, Regions
from tests.server.conftest import assert_nothing_more_is_held, held_by_this_process

SIZE = 2 * PIECE_BYTES + 4096


@pytest.fixture
def memory():
    """An object of `SIZE` bytes, each the number of its position modulo 251."""
    held = shared_memory.SharedMemory(create=True, size=SIZE)
    held.buf[:] = (np.arange(SIZE) % 251).astype(np.uint8).tobytes()
    yield held
    held.close()
    held.unlink()


@pytest.fixture
def regions(memory):
    """With the region `r`, which is all of it but the first 16 bytes."""
    found = Regions()
    found.register("r", f"/{memory.name}", 16, SIZE - 16)
    return found


def read(part) -> bytes:
    return b"".join(bytes(piece) for piece in part.pieces())


def test_parts_are_read_in_pieces_and_written(regions, memory):
    before = bytes(memory.buf)
    part = regions.part("r", 100, PIECE_BYTES + 8)
    assert [len(piece) for piece in part.pieces()] == [PIECE_BYTES, 8]
    assert read(part) == before[116 : 116 + len(part)]
    assert read(regions.part("r", SIZE - 16, 0)) == b""
    regions.part("r", 8, 4).write(memoryview(b"abc"))
    assert bytes(memory.buf) == before[:24] + b"abc" + before[27:]
    with pytest.raises(InvalidInput, match="output takes 5 bytes, shared_memory_byte_size is 4"):
        regions.part("r", 8, 4).write(memoryview(b"abcde"))


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (SIZE, 1), (-1, 2), (3, -1), (2**62, 8)])
def test_a_part_lies_within_its_region(regions, offset, size):
    with pytest.raises(InvalidInput, match=r"'r': .* not within its \d+ bytes"):
        regions.part("r", offset, size)


def test_names_are_used_once_and_forgotten(regions, memory):
    key = memory.name
    with pytest.raises(NameTaken, match="'r' is registered already"):
        regions.register("r", key, 0, 8)
    regions.register("s", key, 0, 8)
    assert [region.name for region in regions.registered()] == ["r", "s"]
    assert regions.registered("s")[0].size_bytes == 8
    part = regions.part("s", 0, 8)
    regions.unregister("s")
    regions.unregister("never there")
    assert read(part) == bytes(range(8)), "a request that uses it goes on"
    for call in (regions.registered, lambda name: regions.part(name, 0, 1)):
        with pytest.raises(UnknownName, match="unknown shared memory region 's'"):
            call("s")
    regions.unregister("")
    assert regions.registered() == ()


def test_an_administrators_own_name_is_not_that_of_anothers_region(memory):
    regions = Regions()
    admin, other = regions.of("admin", sees_all=True), regions.of("box")
    for owner, name in ((admin, "box/r"), (other, "r")):
        owner.register(name, f"/{memory.name}", 0, SIZE)
    admin.unregister("box/r")
    assert [one.owner for one in admin.registered()] == ["box"]
    admin.unregister("box/r")
    assert admin.registered() == ()


def test_forgotten_regions_are_closed(memory):
    before = held_by_this_process()
    regions = Regions()
    regions.register("r", memory.name, 0, 8)
    assert held_by_this_process()[0] - before[0], "an open file"
    regions.unregister("r")
    assert_nothing_more_is_held(before)
    with pytest.raises(InvalidInput):
        regions.register("r", memory.name, 0, SIZE + 1)
    assert_nothing_more_is_held(before)


@pytest.mark.parametrize(
    "key", ["", "/", "..", "/../etc/passwd", "a/b", "/a\0b", "x" * 256, "\ud800", "/no such object"]
)
def test_a_key_names_an_object_and_nothing_else(key):
    with pytest.raises(InvalidInput, match="shared memory region 'r'"):
        Regions().register("r", key, 0, 1)


def test_other_files_than_memory_objects_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "link").symlink_to("secret")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for key in ("link", "folder", "pipe"):
        with pytest.raises(InvalidInput, match="shared memory region 'r'"):
            Regions().register("r", key, 0, 1)


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE + 1), (SIZE, 1), (0, 0), (2**63, 2**63)])
def test_a_region_lies_within_its_object(memory, offset, size):
    with pytest.raises(InvalidInput, match=r"'r': \d+ bytes from \d+ are not within the"):
        Regions().register("r", memory.name, offset, size)


def test_the_number_of_regions_is_bounded(memory, monkeypatch):
    monkeypatch.setattr(module, "MAX_REGIONS", 2)
    regions = Regions()
    for name in "ab":
        regions.register(name, memory.name, 0, 8)
    with pytest.raises(QueueFull, match="2 shared memory regions"):
        regions.register("c", memory.name, 0, 8)
    with pytest.raises(InvalidInput, match="256 characters"):
        regions.register("x" * 256, memory.name, 0, 8)


def test_a_principal_does_not_take_all_regions(memory, monkeypatch):
    monkeypatch.setattr(module, "MAX_REGIONS_OF_PRINCIPAL", 2)
    everybody = Regions()
    one, other = everybody.of("one"), everybody.of("other")
    for name in "ab":
        one.register(name, memory.name, 0, 8)
    with pytest.raises(QueueFull, match="'one' has 2 shared memory regions"):
        one.register("c", memory.name, 0, 8)
    other.register("c", memory.name, 0, 8)
    one.unregister("a")
    one.register("c", memory.name, 0, 8)
    for name in "abc":
        everybody.register(name, memory.name, 0, 8)


def test_an_object_may_be_shortened_or_unlinked_meanwhile():
    name = f"gnnserve-test-{uuid.uuid4().hex}"
    path = module._FOLDER / name
    path.write_bytes(bytes(PIECE_BYTES + 64))
    try:
        regions = Regions()
        regions.register("r", name, 0, PIECE_BYTES + 64)
        part = regions.part("r", 0, PIECE_BYTES + 64)
        os.truncate(path, PIECE_BYTES + 8)
        with pytest.raises(InvalidInput, match=f"shorter and ends at byte {PIECE_BYTES + 8}"):
            read(part)
    finally:
        path.unlink()
    assert len(read(regions.part("r", 0, 100))) == 100


def test_a_server_without_shared_memory_refuses_every_use():
    regions = Regions(offered=False)
    for call in (
        lambda: regions.register("r", "k", 0, 1),
        lambda: regions.unregister(""),
        regions.registered,
        lambda: regions.part("r", 0, 1),
    ):
        with pytest.raises(Unsupported, match=r"server\.shared_memory"):
            call()
