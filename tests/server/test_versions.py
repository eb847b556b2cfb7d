"""Rules for versions: which entry a request gets, what is kept on disk, canaries that go back."""

import logging
import shutil
import threading

import pytest

from bench.kit.waiting import wait_for
from serve.core.versions.comparison import LEAST
from serve.core.versions.rules import VersionRules
from serve.errors import ConfigError, InvalidInput, Mismatch, NotReady, UnknownName
from serve.models.version_file import KeptRules, read_rules, write_rules
from serve.obs.record import RequestRecord
from serve.server.version_facts import VersionChange
from serve.server.versions import ModelVersions
from tests.server.test_rollout import folder, lanes, make_models, models, write_version

__all__ = ["folder", "lanes", "models"]
SPLIT = VersionChange(split={1: 50.0, 2: 50.0})


@pytest.fixture
def three(folder, models):
    """A catalogue with versions 1, 2 and 3, and what changes its rules."""
    for version in (2, 3):
        write_version(folder, version, float(version))
    versions = ModelVersions(models.catalogue)
    models.rollout._read_rules = versions.read
    models.load("m")
    return versions


def answering(models, count=200):
    """The versions that answer requests without a version, by id."""
    return [models.catalogue.get("m", "", f"r{number}").spec.version for number in range(count)]


def record(version, number=0, **fields):
    return RequestRecord(
        request_uid=f"u{number}", model="m", version=str(version), arrived_unix_ns=0, **fields
    )


# -- which version ------------------------------------------------------------------------------


def test_without_rules_the_newest_answers(models, three):
    assert set(answering(models)) == {3}
    assert three.facts("m")[0].main == 3


def test_a_pin_a_split_and_back(models, three):
    three.change("m", VersionChange(split={1: 100.0}))
    assert set(answering(models)) == {1}
    three.change("m", SPLIT)
    first = answering(models)
    assert 60 < first.count(1) < 140
    assert first.count(1) + first.count(2) == 200
    assert answering(models) == first
    assert three.change("m", VersionChange(roll_back=True)).rules.shares == ((1, 100.0),)
    assert set(answering(models)) == {1}
    three.change("m", VersionChange(roll_back=True))
    assert answering(models) == first
    three.change("m", VersionChange(split={}))
    assert set(answering(models)) == {3}


def test_a_named_version_wins(models, three):
    three.change("m", VersionChange(split={1: 100.0}))
    assert models.catalogue.get("m", "2", "r1").spec.version == 2


def test_requests_without_an_id_are_shared_out_too(models, three):
    three.change("m", SPLIT)
    found = [models.catalogue.get("m", "", "").spec.version for _ in range(200)]
    assert 60 < found.count(1) < 140


def test_a_new_version_does_not_pass_a_pin(folder, models, three):
    three.change("m", VersionChange(split={2: 100.0}))
    write_version(folder, 4, 4.0)
    models.load("m")
    assert models.catalogue.versions("m") == {1, 2, 3, 4}
    assert set(answering(models)) == {2}


def test_a_pinned_version_that_is_gone_is_not_replaced_by_another(folder, models, three):
    three.change("m", VersionChange(split={1: 100.0}))
    shutil.rmtree(folder / "1")
    models.load("m")
    with pytest.raises(NotReady, match="no version with a share serves: 1=100"):
        models.catalogue.get("m", "", "r1")
    assert three.facts("m")[0].main is None
    three.change("m", VersionChange(split={2: 100.0}))
    assert set(answering(models)) == {2}


def test_changes_that_make_no_sense_change_nothing(models, three):
    three.change("m", SPLIT)
    for change, error, words in (
        (VersionChange(split={1: 50.0, 2: 60.0}), InvalidInput, "110 percent"),
        (VersionChange(split={1: 50.0, 9: 50.0}), UnknownName, "no version '9'"),
        (VersionChange(shadow=9), UnknownName, "no version '9'"),
        (VersionChange(shadow=1), InvalidInput, "answers requests already"),
        (VersionChange(split={1: 100.0}, canary=1), InvalidInput, "beside another's"),
        (VersionChange(), InvalidInput, "give one of"),
        (VersionChange(split={}, roll_back=True), InvalidInput, "give one of"),
    ):
        with pytest.raises(error, match=words):
            three.change("m", change)
    with pytest.raises(UnknownName):
        three.change("nope", SPLIT)
    with pytest.raises(UnknownName):
        three.facts("nope")
    assert three.facts("m")[0].rules.shares == ((1, 50.0), (2, 50.0))


def test_there_is_nothing_to_go_back_to_at_first(three):
    with pytest.raises(Mismatch, match="go back"):
        three.change("m", VersionChange(roll_back=True))


# -- on disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kept",
    [
        KeptRules(),
        KeptRules(VersionRules(((1, 100.0),))),
        KeptRules(VersionRules(((1, 100 / 3), (2, 200 / 3)), canary=2), VersionRules()),
        KeptRules(VersionRules(shadow=3, shadow_percent=12.5), VersionRules(((7, 100.0),))),
    ],
)
def test_the_file_holds_what_was_written(folder, kept):
    write_rules(folder, kept)
    assert read_rules(folder) == kept
    left = sorted(path.name for path in folder.iterdir() if "toml" in path.name)
    assert left == ["config.toml", "versions.toml"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[split]\n1 = 90\n2 = 20", "110 percent"),
        ("[split]\n01 = 100", "split"),
        ("[split]\none = 100", "split"),
        ("splitt = 1", "splitt"),
        ("canary = 2", "canary"),
        ("[previous]\nshadow = -1", "previous"),
        ("shadow = ", "TOML"),
    ],
)
def test_a_broken_file_is_named_and_changes_nothing(folder, models, three, text, words):
    three.change("m", SPLIT)
    (folder / "versions.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)versions\.toml.*{words}"):
        models.load("m")
    assert three.facts("m")[0].rules.shares == ((1, 50.0), (2, 50.0))
    assert set(answering(models)) == {1, 2}


def test_rules_survive_a_restart(tmp_path, folder, models, lanes, three):
    three.change("m", VersionChange(split={2: 100.0}))
    three.change("m", VersionChange(split={1: 90.0, 2: 10.0}, canary=2))
    again = make_models(tmp_path, folder, lanes)
    versions = ModelVersions(again.catalogue)
    again.rollout._read_rules = versions.read
    again.load("m")
    try:
        assert answering(again) == answering(models)
        assert again.catalogue.router.watches("m")
        assert versions.change("m", VersionChange(roll_back=True)).rules.shares == ((2, 100.0),)
    finally:
        again.rollout.close()


def test_a_change_by_hand_counts_from_the_next_load(folder, models, three):
    (folder / "versions.toml").write_text("[split]\n1 = 100\n")
    assert set(answering(models)) == {3}
    models.load("m")
    assert set(answering(models)) == {1}
    (folder / "versions.toml").unlink()
    models.load("m")
    assert set(answering(models)) == {3}


def test_rules_hold_where_they_cannot_be_written_and_a_load_does_not_undo_them(
    folder, models, three, monkeypatch, caplog
):
    three.change("m", VersionChange(split={2: 100.0}))

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("serve.server.versions.write_rules", refuse)
    facts = three.change("m", VersionChange(split={1: 100.0}))
    assert facts.not_kept == "versions.toml cannot be written: Read-only file system"
    assert "the rules end with the server" in caplog.text
    models.load("m")
    assert set(answering(models)) == {1}
    monkeypatch.undo()
    assert three.change("m", VersionChange(split={3: 100.0})).not_kept == ""


# -- canaries -----------------------------------------------------------------------------------


def on_trial(three):
    three.change("m", VersionChange(split={1: 50.0, 2: 50.0}, canary=2))
    events = []
    three.on_event = events.append
    return events


@pytest.mark.parametrize(
    "bad",
    [
        {"status": "INTERNAL", "reason": "model_error"},
        {"nonfinite_values": 3},
        {"violated": True},
        {"status": "DEADLINE_EXCEEDED", "reason": "deadline"},
        {"status": "UNAVAILABLE", "reason": "lane_lost"},
    ],
)
def test_a_canary_that_does_worse_goes_back(folder, models, three, caplog, bad):
    caplog.set_level(logging.INFO)
    events = on_trial(three)
    for number in range(LEAST):
        three.ended(record(1, number))
        three.ended(record(2, number, **bad))
    assert [(event.model, event.version) for event in events] == [("m", 2)]
    assert set(answering(models)) == {1}
    (facts,) = three.facts("m")
    assert facts.taken_back.startswith(f"version 2: {LEAST} of its last {LEAST} requests")
    assert facts.previous is not None
    assert facts.previous.canary == 2
    assert three.taken_back_count == {("m", "2"): 1}
    assert "model m: the canary, version 2, is taken back" in caplog.text
    wait_for(lambda: read_rules(folder).now == facts.rules, "the rules on disk")


def test_a_canary_goes_back_where_no_thread_can_start(models, three, monkeypatch):
    on_trial(three)
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    for number in range(LEAST):
        three.ended(record(1, number))
        three.ended(record(2, number, violated=True))
    assert set(answering(models)) == {1}
    assert "can't start new thread" in three.facts("m")[0].not_kept


def cannot_start(_):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    "others_doing",
    [
        {"status": "CANCELLED", "reason": "cancelled"},
        {"status": "INVALID_ARGUMENT", "reason": "invalid_input"},
        {"status": "RESOURCE_EXHAUSTED", "reason": "queue_full"},
    ],
)
def test_what_is_not_the_models_doing_does_not_count(three, others_doing):
    events = on_trial(three)
    for number in range(3 * LEAST):
        three.ended(record(1, number))
        three.ended(record(2, number, **others_doing))
    assert events == []


def test_a_new_split_forgets_why_the_last_canary_went_back(three):
    on_trial(three)
    for number in range(LEAST):
        three.ended(record(1, number))
        three.ended(record(2, number, violated=True))
    assert three.facts("m")[0].taken_back
    assert three.change("m", SPLIT).taken_back == ""
