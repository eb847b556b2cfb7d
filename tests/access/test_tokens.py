"""The tokens file: written and read back, refused with words, whatever is in it."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve.access import tokens
from serve.access.callers import Callers
from serve.access.tokens import (
    TenantLimits,
    Token,
    TokensFile,
    changing_tokens,
    hash_of,
    new_token,
    read_tokens,
    text_of,
    write_tokens,
)
from serve.cli import app
from serve.errors import ConfigError

NAMES = st.text(min_size=1, max_size=20).filter(str.isprintable)
ROLES = st.lists(st.sampled_from(["infer", "observe", "admin"]), min_size=1, max_size=3)
TIMES = st.datetimes(datetime(1980, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
ROWS = st.builds(
    Token,
    principal=NAMES,
    roles=ROLES.map(tuple),
    hash=st.binary(min_size=32, max_size=32).map(lambda raw: f"sha256:{raw.hex()}"),
    tenant=st.none() | NAMES,
    expires=st.none() | TIMES,
)
LIMITS = st.builds(
    TenantLimits,
    name=NAMES,
    weight=st.floats(0.001, 1e6),
    max_in_queue=st.none() | st.integers(1, 2**40),
    requests_per_s=st.none() | st.floats(0.001, 1e9),
    highest_priority=st.none() | st.integers(1, 2**31 - 1),
    min_qos_target_us=st.none() | st.integers(1, 2**40),
)


@given(st.lists(ROWS, max_size=4), st.lists(LIMITS, max_size=3, unique_by=lambda row: row.name))
@settings(max_examples=80, deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, rows, limits):
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    rows = {row.hash: row for row in rows}
    content = TokensFile(token=tuple(rows.values()), tenant=tuple(limits))
    write_tokens(path, content)
    assert read_tokens(path) == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["tokens.toml"]


GOOD = text_of(
    TokensFile(
        token=(Token(principal="a", roles=("infer",), hash=hash_of("x"), tenant="t"),),
        tenant=(TenantLimits(name="t", weight=2.0, requests_per_s=5.0),),
    )
).encode()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused_with_the_files_name(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    content = bytearray(GOOD)
    if data.draw(st.booleans()):
        content = bytearray(data.draw(st.binary(max_size=200)))
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path.write_bytes(bytes(content))
    path.chmod(0o600)
    found, problem = outcome(path)
    if found is None:
        assert str(path) in problem
    else:
        assert all((one.hash is None) != (one.certificate is None) for one in found.token)
        Callers(path)


def outcome(path):
    """Return the content of the file, or why it is refused."""
    try:
        return read_tokens(path), ""
    except ConfigError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[token]]\nprincipal = 'a'\nroles = ['infer']\n", "both missing"),
        ("[[token]]\nprincipal = 'a'\nroles = ['infer']\nhash = 'x'\n", "token[0].hash"),
        ("[[token]]\nprincipal = 'a'\nroles = ['king']\ncertificate = 'b'\n", "token[0].roles"),
        ("[[token]]\nprincipal = 'a'\nroles = []\ncertificate = 'b'\n", "token[0].roles"),
        ("[[token]]\nprincpal = 'a'\n", "did you mean 'token[0].principal'"),
        (
            "[[token]]\nprincipal = 'a'\nroles = ['infer']\ncertificate = 'b'\n"
            "expires = 2030-01-01T00:00:00\n",
            "token[0].expires",
        ),
        ("[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'\n", "'a' is given more than once"),
        ("[[tenant]]\nname = 'a'\nweight = 0\n", "tenant[0].weight"),
        ('[[tenant]]\nname = "a\\u001b[2J"\n', r"tenant[0].name: 'a\x1b[2J' has"),
        (
            '[[token]]\nprincipal = "a\\u202e"\ntenant = "\\n"\nroles = ["infer"]\n'
            'certificate = "b"\n',
            r"token[0].tenant: '\n' has",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path, text, words):
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    assert words in str(caught.value)


def test_a_file_that_others_may_write_is_refused(tmp_path):
    path = tmp_path / "tokens.toml"
    write_tokens(path, TokensFile())
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod go-w"):
        read_tokens(path)


def test_tokens_are_long_and_never_the_same():
    found = {new_token() for _ in range(100)}
    assert len(found) == 100
    assert all(len(one) == 47 for one in found)


def command(*arguments):
    return CliRunner().invoke(app, ["token", *arguments])


def test_the_commands_make_list_and_revoke(tmp_path):
    path = tmp_path / "tokens.toml"
    file = ("--file", str(path))
    done = command("new", "mobile", "--role", "infer", "--expires", "90d", "--tenant", "m", *file)
    assert done.exit_code == 0
    token = done.stdout.strip().splitlines()[-1]
    assert hash_of(token) == read_tokens(path).token[0].hash
    assert token not in path.read_text()
    assert command("new", "box", "--certificate", "box.example", *file).exit_code == 0
    rows = msgspec.json.decode(command("list", "--json", *file).stdout)
    assert [(row["principal"], row["tenant"], row["roles"]) for row in rows] == [
        ("mobile", "m", ["infer"]),
        ("box", "box", ["infer"]),
    ]
    assert rows[0]["expires"] is not None
    assert "mobile" in command("list", *file).stdout
    assert command("revoke", rows[0]["id"], *file).exit_code == 0
    assert [one.principal for one in read_tokens(path).token] == ["box"]
    assert command("revoke", "box", *file).exit_code == 0
    assert read_tokens(path).token == ()
    gone = command("revoke", "box", *file)
    assert isinstance(gone.exception, ConfigError)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\x7f", "a\u202eb", "a\u200bb"])
@pytest.mark.parametrize("option", [None, "--tenant", "--certificate"])
def test_a_name_with_characters_that_do_not_show_is_refused(tmp_path, name, option):
    """It would look like another one in logs, or move the cursor of who reads them."""
    path = tmp_path / "tokens.toml"
    arguments = [name] if option is None else ["a", option, name]
    refused = command("new", *arguments, "--file", str(path)).exception
    assert isinstance(refused, ConfigError)
    assert repr(name) in str(refused)
    assert not path.exists()


def test_a_file_keeps_its_owner_group_and_mode(tmp_path):
    """Root changes the file of a server that runs as another user, which must still read it."""
    path = tmp_path / "tokens.toml"
    write_tokens(path, TokensFile())
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    before = path.stat()
    assert command("new", "a", "--file", str(path)).exit_code == 0
    after = path.stat()
    assert read_tokens(path).token
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert after.st_mode == before.st_mode


def test_two_commands_change_the_file_one_after_the_other(tmp_path, monkeypatch):
    path = tmp_path / "tokens.toml"
    assert command("new", "old", "--file", str(path)).exit_code == 0
    with ThreadPoolExecutor(1) as other:
        with changing_tokens(path):
            made = other.submit(command, "new", "fresh", "--file", str(path))
            wait([made], 0.2)
            write_tokens(path, TokensFile())
        assert made.result().exit_code == 0
    assert [one.principal for one in read_tokens(path).token] == ["fresh"]
    monkeypatch.setattr(tokens, "_PATIENCE_S", 0.05)
    with changing_tokens(path):
        done = command("revoke", "fresh", "--file", str(path))
    assert "another command changes" in str(done.exception)


def test_the_commands_find_the_file_by_the_configuration(tmp_path):
    config = tmp_path / "gnnserve.toml"
    config.write_text('[auth]\ntokens_file = "here.toml"\n')
    assert command("new", "a", "--config", str(config)).exit_code == 0
    assert read_tokens(tmp_path / "here.toml").token[0].principal == "a"
    config.write_text("")
    done = command("list", "--config", str(config))
    assert "auth.tokens_file is not set" in str(done.exception)


@pytest.mark.parametrize(
    "arguments", [("a", "--role", "king"), ("a", "--expires", "soon"), ("", "--role", "infer")]
)
def test_wrong_arguments_write_nothing(tmp_path, arguments):
    path = tmp_path / "tokens.toml"
    done = command("new", *arguments, "--file", str(path))
    assert isinstance(done.exception, ConfigError)
    assert not path.exists()
