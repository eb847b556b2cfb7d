"""The thread that compiles models while they serve, with a stand-in for the process that does."""

import threading
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from bench.kit.processes import PATIENCE_S, wait_for
from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.errors import ModelError, NotReady
from serve.models.cache import CalibrationCache
from serve.server.background import BackgroundCompiler


class Process:
    """Answers what it is told to, or waits until it is killed."""

    def __init__(self, answers):
        self.answers, self.killed = answers, threading.Event()

    def probe(self, message, timeout_s, progress):
        answer = self.answers[message.spec.name]
        if answer is None:
            self.killed.wait(PATIENCE_S)
            raise NotReady("the process died")
        if isinstance(answer, Exception):
            raise answer
        return "signature", answer

    def kill(self):
        self.killed.set()


def entry(name, *, retired=False):
    spec = SimpleNamespace(name=name, key=f"{name}:1")
    return SimpleNamespace(spec=spec, digest=name, retired=retired)


@pytest.fixture
def compiler(tmp_path):
    """Builds one over answers by model; also what it handed on, and the processes it started."""
    made = []

    def build(answers):
        taken, processes = [], []

        @contextmanager
        def calibrator(*, background):
            assert background
            processes.append(Process(answers))
            yield processes[-1]

        def recompiled(entry, signature, calibration, before_each):
            before_each()
            taken.append((entry.spec.name, calibration))

        registry = SimpleNamespace(to_compile=SimpleQueue(), recompiled=recompiled)
        found = BackgroundCompiler(
            registry,
            CalibrationCache(Path(tmp_path), compiles=True),
            SimpleNamespace(calibrator=calibrator, calibrators=SimpleNamespace(interrupted=False)),
            calibration_s=1.0,
            budget_bytes=1 << 30,
            idle=lambda: True,
        )
        found.start()
        made.append(found)
        return found, registry.to_compile, taken, processes

    yield build
    for one in made:
        one.stop()


def test_takes_them_in_turn_whatever_becomes_of_one(compiler, caplog):
    answers = {"broken": ModelError("of no use"), "bug": KeyError("?"), "good": "calibration"}
    _, waiting, taken, processes = compiler(answers)
    for one in (entry("broken"), entry("bug"), entry("gone", retired=True), entry("good")):
        waiting.put(one)
    wait_for(lambda: taken, "the last model")
    assert taken == [("good", "calibration")]
    assert len(processes) == 3
    assert "broken:1: not compiled: of no use" in caplog.text


def test_stopping_ends_what_runs(compiler, caplog):
    found, waiting, taken, processes = compiler({"slow": None})
    waiting.put(entry("slow"))
    wait_for(lambda: processes, "a process")
    found.stop()
    assert processes[0].killed.is_set()
    assert not found._thread.is_alive()
    assert (taken, caplog.text) == ([], "")


@pytest.mark.parametrize(
    ("compiler", "options", "later"),
    [
        ("true", 'compile = "background"', True),
        ("no-such-compiler", 'compile = "background"', False),
        ("true", 'compile = "background"\nexecutor = "csr"', False),
        ("true", "compile = true", False),
    ],
)
def test_what_is_compiled_later(tmp_path, monkeypatch, caplog, compiler, options, later):
    """Only what `auto` may compile, and where something can; the log says why nothing can."""
    monkeypatch.setenv("CXX", compiler)
    path = tmp_path / "server.toml"
    path.write_text(f'[models]\ncache = "{tmp_path}"\n{options}\n')
    config = load_config(path)
    with caplog.at_level("INFO"):
        cache = calibration_cache(config, device_of(config))
    assert (cache.later is not None) == later
    assert ("there is no no-such-compiler" in caplog.text) == (compiler == "no-such-compiler")
    if later:
        # Where `true` would have put it.
        path.write_text(f'[models]\ncache = "{tmp_path}"\ncompile = true\n')
        first = calibration_cache(load_config(path), device_of(config))
        assert cache.later.package("x") == first.package("x") != cache.package("x")
