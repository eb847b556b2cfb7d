"""The configuration of a running server, read again: what is taken, refused and told."""

import logging

import pytest

from serve.commands.reload import ConfigReload
from serve.config import load_config


class Running:
    def __init__(self, tmp_path):
        self.path = tmp_path / "server.toml"
        self.write("")
        self.taken = []
        self.reload = ConfigReload(
            load_config(self.path), lambda: load_config(self.path), self.taken.append
        )

    def write(self, text):
        self.path.write_text(text)


@pytest.fixture
def running(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    return Running(tmp_path)


def told(caplog):
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_a_change_is_taken_once(running, caplog):
    running.write("[server]\nmax_queue = 7\n")
    running.reload.again()
    assert [config.server.max_queue for config in running.taken] == [7]
    assert told(caplog) == [("INFO", "configuration changed: server.max_queue: 512 to 7")]
    running.reload.again()
    assert len(running.taken) == 1
    assert told(caplog) == [("INFO", "the configuration is as it was")]


def test_what_needs_a_restart_is_told_each_time_and_not_taken(running, caplog):
    running.write("[server]\ngrpc_port = 9\n")
    for _ in range(2):
        running.reload.again()
        line = "configuration needs a restart: server.grpc_port: 8001 to 9"
        assert told(caplog) == [("WARNING", line)]
    assert running.taken == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server\n", "not valid TOML"),
        ("[server]\nmax_queue = 0\nhostt = 1\n", "did you mean 'server.host'"),
        ("[report]\nkeep = 'for ever'\n", "report.keep"),
        ("[server]\nmax_queue = 9\n[scheduling]\npolicy = 'best'\n", "scheduling.policy"),
    ],
)
def test_a_file_with_a_mistake_changes_nothing_and_is_told(running, caplog, text, words):
    running.write(text)
    running.reload.again()
    ((level, message),) = told(caplog)
    assert level == "ERROR"
    assert message.startswith(f"the configuration stays as it was: {running.path}")
    assert words in message
    assert running.taken == []
    # The next one that is right counts.
    running.write("[server]\nmax_queue = 7\n")
    running.reload.again()
    assert [config.server.max_queue for config in running.taken] == [7]


def test_a_file_that_is_gone_changes_nothing(running, caplog):
    running.path.unlink()
    running.reload.again()
    assert "cannot be read" in told(caplog)[0][1]
    assert running.taken == []
