"""Whom a call comes from, by what it carries; and that changes of the file count at once."""

import base64

import pytest

from bench.kit.waiting import wait_for
from serve.access.callers import INSIDE, PEER, Callers
from serve.access.principal import CLIENT_ROLES, EVERY_ROLE, Role
from serve.access.settings import AccessSettings
from serve.access.tokens import Token, TokensFile, hash_of, read_tokens, write_tokens
from serve.access.watching import FileWatcher
from serve.errors import ConfigError
from tests.access.support import TENANT, TOKENS, callers_of


def basic(token):
    return "Basic " + base64.b64encode(f"me:{token}".encode()).decode()


@pytest.mark.parametrize(
    "form", [lambda token: f"Bearer {token}", lambda t: f"bearer  {t} ", basic]
)
def test_a_token_is_its_principals(tmp_path, form):
    callers = callers_of(tmp_path)
    found = callers.find(form(TOKENS["infer"]))
    assert (found.name, found.roles, found.tenant.name) == ("app", {Role.INFER}, TENANT)
    assert found.tenant.highest_priority == 2
    assert callers.find(form(TOKENS["other tenant"])).tenant.name == "guest"


@pytest.mark.parametrize(
    ("authorization", "words"),
    [
        (None, "carries none"),
        ("", "neither"),
        ("Bearer", "neither"),
        ("Bearer ", "neither"),
        ("Basic !!!", "neither"),
        ("Basic " + base64.b64encode(b"no colon").decode(), "neither"),
        ("Digest x", "neither"),
        ("Bearer \u20ac\udc80", "not one of this server"),
        ("Bearer " + "x" * 100_000, "not one of this server"),
        (f"Bearer {TOKENS['wrong']}", "not one of this server"),
        (f"Bearer {TOKENS['expired']}", "has expired"),
        (f"Bearer {hash_of(TOKENS['infer'])}", "not one of this server"),
    ],
)
def test_what_is_no_credential_is_said_without_the_token(tmp_path, authorization, words):
    found = callers_of(tmp_path).find(authorization)
    assert found.roles == frozenset()
    assert words in found.problem
    assert TOKENS["wrong"] not in found.problem


def test_a_credential_expires_while_the_server_runs(tmp_path):
    path = tmp_path / "tokens.toml"
    now_s = 1_900_000_000.0
    write_tokens(path, TokensFile())
    text = f'[[token]]\nprincipal = "a"\nroles = ["infer"]\nhash = "{hash_of("x")}"\n'
    path.write_text(text + "expires = 2030-01-01T00:00:00Z\n")
    callers = Callers(path, clock_s=lambda: now_s)
    expires_s = read_tokens(path).token[0].expires.timestamp()
    now_s = expires_s - 0.001
    assert callers.find("Bearer x").name == "a"
    now_s = expires_s
    assert callers.find("Bearer x").problem


def test_a_clock_that_is_set_past_an_expiry_is_told_both_ways(tmp_path):
    path = tmp_path / "tokens.toml"
    text = f'[[token]]\nprincipal = "a"\nroles = ["infer"]\nhash = "{hash_of("x")}"\n'
    path.write_text(text + "expires = 2030-01-01T00:00:00Z\n")
    path.chmod(0o600)
    before_s = now_s = read_tokens(path).token[0].expires.timestamp() - 3600
    callers = Callers(path, clock_s=lambda: now_s)
    told = []
    callers.on_change(lambda tenants: told.append(bool(callers.find("Bearer x").name)))
    (files,) = callers.watched
    for step_s in (86_400, 0, 0, 86_400):
        now_s = before_s + step_s
        files.look()
    assert told == [True, False, True, False]


def test_administrators_are_clients_on_the_port_unless_allowed(tmp_path):
    header = f"Bearer {TOKENS['admin']}"
    assert callers_of(tmp_path).find(header).roles == CLIENT_ROLES
    assert callers_of(tmp_path, admin_on_port=True).find(header).roles == EVERY_ROLE


def test_names_of_certificates(tmp_path):
    callers = callers_of(tmp_path)
    assert callers.find(None, ["x.example", "box.example"]).name == "box"
    assert "x.example" in callers.find(None, ["x.example"]).problem
    without = Callers(certificates=True)
    assert without.find(None, ["x.example"]).roles == CLIENT_ROLES
    assert without.find(None).problem


def test_names_are_believed_from_processes_of_this_server_alone(tmp_path):
    callers = callers_of(tmp_path)
    good = [(INSIDE, callers.inside), (PEER, "x.example,box.example")]
    assert callers.of_metadata(good).name == "box"
    assert callers.of_metadata([(INSIDE, "guess"), good[1]]).problem
    assert callers.of_metadata(good[1:]).problem
    assert callers.of_metadata([("bin-bin", b"\xff"), *good]).name == "box"


def test_without_credentials_everybody_is_the_same(tmp_path):
    callers = Callers()
    assert not callers.limited
    for header in (None, "Bearer x", "nonsense"):
        assert callers.find(header).roles == EVERY_ROLE
    clients = AccessSettings(open_to_all=False).callers()
    assert clients.limited
    assert clients.find(None).roles == CLIENT_ROLES
    assert clients.find(f"Bearer {clients.own_token}").roles == EVERY_ROLE


def test_a_changed_file_counts_at_once_and_a_broken_one_not(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "tokens.toml"
    row = Token(principal="a", roles=("infer",), hash=hash_of("old"))
    write_tokens(path, TokensFile(token=(row,)))
    callers, told = Callers(path), []
    callers.on_change(told.append)
    watcher = FileWatcher(*callers.watched)
    watcher.start()
    try:
        renewed = Token(principal="a", roles=("infer",), hash=hash_of("new"))
        write_tokens(path, TokensFile(token=(renewed,)))
        wait_for(lambda: callers.find("Bearer new").name == "a", "the new token")
        assert callers.find("Bearer old").problem
        assert len(told) == 2
        path.write_text("[[token]]\n")
        wait_for(lambda: "stay as they were" in caplog.text, "the complaint")
        assert callers.find("Bearer new").name == "a"
        path.unlink()
        write_tokens(path, TokensFile(token=(row,)))
        wait_for(lambda: callers.find("Bearer old").name == "a", "the file after it was gone")
    finally:
        watcher.stop()
    assert "old" not in caplog.text.replace(str(path), "")
    assert "sha256" not in caplog.text


def test_a_missing_file_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Callers(tmp_path / "none.toml")
