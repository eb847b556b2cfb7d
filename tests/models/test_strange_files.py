"""Strange things in a repository: each is told for its own entry, and never waited for."""

import json
import os
import resource
import socket
import struct
from pathlib import Path

import pytest

from serve import toml_tables
from serve.errors import ConfigError, UnknownName
from serve.models.repository import BrokenModel, ModelSpec, content_hash, find, scan

CONFIG = '[model]\nfactory = "./model.py:Node"\n'


def text(content):
    """The file holds that text."""
    return lambda path: path.write_text(content)


def data(content):
    return lambda path: path.write_bytes(content)


def instead(make):
    """Something else lies where the file was."""

    def change(path):
        path.unlink()
        make(path)

    return change


def listening_socket(path):
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path may not be long
    os.close(folder)


def link_to_a_pipe(path):
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def header(entries):
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return data(struct.pack("<Q", len(raw)) + raw)


def tensor(shape, offsets=(0, 8)):
    return {"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}


SPECIAL = {
    "a named pipe": (instead(os.mkfifo), "it is a named pipe, not a regular file"),
    "a link to a named pipe": (instead(link_to_a_pipe), "it is a named pipe"),
    "a link to an endless device": (
        instead(lambda p: p.symlink_to("/dev/zero")),
        "it is a device, not a regular file",
    ),
    "a link to a device that waits": (
        instead(lambda p: p.symlink_to("/dev/ptmx")),
        "it is a device",
    ),
    "a folder": (instead(lambda p: p.mkdir()), "it is a folder, not a regular file"),
    "a socket": (instead(listening_socket), "it is a socket, not a regular file"),
    "a link to itself": (instead(lambda p: p.symlink_to(p.name)), "symbolic links"),
    "a link to nothing": (instead(lambda p: p.symlink_to("nowhere")), "No such file"),
}
CONFIGS = SPECIAL | {
    "5,000 digits": (text(f"{CONFIG}num_features = {'9' * 5000}"), "not valid TOML"),
    "an integer that no lane can be told": (
        text(f"{CONFIG}[model.args]\na = {2**70}"),
        "model.args: ",
    ),
    "100,000 brackets": (text("a = " + "[" * 100_000), "nested too deep"),
    "100,000 tables in each other": (text("a = " + "{a = " * 100_000), "nested too deep"),
    "a key of 100,000 parts": (text("a" + ".a" * 100_000 + " = 1"), "a key of more than 200 parts"),
    "a table of 100,000 parts": (text("[a" + ".a" * 100_000 + "]"), "more than 200 parts"),
    "more than a mebibyte": (text(CONFIG + "#" * (1 << 20)), "it has more than 1048576 bytes"),
    "arguments that fit no packet": (
        text(f'{CONFIG}[model.args]\na = "{"x" * 100_000}"'),
        "bytes of settings (usually model.args",
    ),
    "not UTF-8": (data(CONFIG.encode() + b'description = "\xff"'), "not valid TOML"),
    "a NUL": (text(f'{CONFIG}description = "\0"'), "not valid TOML"),
    "an unknown key of a megabyte": (text(f'"{"k" * 1_000_000}" = 1'), "unknown key"),
    "a factory of a megabyte": (
        text(f'[model]\nfactory = "{"f" * 1_000_000}"'),
        "model.factory",
    ),
}
WEIGHTS = SPECIAL | {
    "20,000 dimensions": (
        header(tensor([2**31] * 20_000)),
        "not a safetensors file",
    ),
    "a shape of 2^63s": (header(tensor([2**63 - 1] * 8)), "not a safetensors file"),
    "brackets in its header": (header(b'{"w":' + b"[" * 100_000), "not a safetensors file"),
    "brackets in a shape": (
        header(b'{"w": {"dtype": "F32", "shape": ' + b"[" * 100_000),
        "not a safetensors file",
    ),
    "5,000 digits": (
        header(b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'),
        "not a safetensors file",
    ),
    "a header of 2^63 bytes": (data(struct.pack("<Q", 2**63) + bytes(99)), "header of 92233"),
    "a header of 17 MiB": (
        lambda path: (path.write_bytes(struct.pack("<Q", 17 << 20)), os.truncate(path, 18 << 20)),
        "header of 17825792 bytes",
    ),
    "names that are no text": (header(b'{"\xff": 1}'), "not a safetensors file"),
    "a name of a megabyte": (
        header({"n" * 1_000_000: {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}),
        "tensor 'nnn",
    ),
    "100 GB that are not there": (
        lambda path: (
            header(tensor([25_000_000_000], (0, 100_000_000_000)))(path),
            os.truncate(path, 99_000_000_000),
        ),
        "truncated",
    ),
}
SOURCES = SPECIAL | {
    "a link to nothing": (SPECIAL["a link to nothing"][0], "does not exist"),
    "17 MiB": (
        lambda path: os.truncate(path, 17 << 20),
        "has 17825792 bytes; the limit is 16777216",
    ),
}
CASES = [
    pytest.param(file, change, told, id=f"{file}-{name}")
    for file, cases in (
        ("config.toml", CONFIGS),
        ("1/weights.safetensors", WEIGHTS),
        ("model.py", SOURCES),
    )
    for name, (change, told) in cases.items()
]


@pytest.fixture(autouse=True)
def little_memory():
    """Whoever reads an endless device runs out of what this process may take, not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.parametrize(("file", "change", "told"), CASES)
def test_a_strange_file_is_told_and_harms_no_neighbour(put, file, change, told):
    folder = put()
    put("other")
    change(folder / file)

    broken, fine = scan(folder.parent)

    assert isinstance(broken, BrokenModel)
    assert (broken.name, broken.version) == ("mine", 1)
    assert told in broken.reason
    assert str(folder) in broken.reason
    assert len(broken.reason) <= 1001
    broken.reason.encode()
    assert isinstance(fine, ModelSpec)
    with pytest.raises(ConfigError):
        find(folder.parent, "mine")


@pytest.mark.parametrize("make", ["folder", "version", "link"])
def test_names_that_are_no_text(put, make):
    folder = put()
    strange = b"\xff\xfe"
    if make == "folder":
        os.mkdir(os.fsencode(folder.parent) + b"/" + strange)
    elif make == "version":
        os.rename(os.fsencode(folder / "1"), os.fsencode(folder) + b"/" + strange)
    else:
        os.symlink(strange, os.fsencode(folder.parent) + b"/" + strange)
    found = scan(folder.parent)
    for one in found:
        one.name.encode()
        if isinstance(one, BrokenModel):
            one.reason.encode()
    assert len(found) == {"folder": 2, "version": 1, "link": 1}[make]
    with pytest.raises(UnknownName) as caught:
        find(folder.parent, "nobody")
    str(caught.value).encode()


def test_whatever_a_library_raises_is_that_entrys_matter(put, monkeypatch):
    folder = put()
    put("other")
    loads = toml_tables.tomllib.loads

    def fail(content):
        if "odd" in content:
            raise MemoryError("no such luck")
        return loads(content)

    monkeypatch.setattr(toml_tables.tomllib, "loads", fail)
    (folder / "config.toml").write_text(CONFIG + "# odd")
    broken, fine = scan(folder.parent)
    assert "MemoryError: no such luck" in broken.reason
    assert fine.name == "other"


@pytest.mark.parametrize("file", ["config.toml", "model.py", "1/weights.safetensors"])
def test_what_turned_strange_since_the_scan_is_refused(put, file):
    folder = put()
    spec = find(folder.parent, "mine")
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(ConfigError, match="named pipe"):
        content_hash(spec)


@pytest.mark.parametrize("version", ["9" * 5000, "١", "²", "1" * 18, "1 ", "+1", "1_0"])
def test_versions_that_clients_make_up(put, version):
    root: Path = put().parent
    with pytest.raises(UnknownName) as caught:
        find(root, "mine", version)
    assert len(str(caught.value)) < 300
    with pytest.raises(UnknownName) as caught:
        find(root, version, version)
    assert len(str(caught.value)) < 300
