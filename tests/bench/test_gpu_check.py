"""`make gpu-check` itself: stages are told apart, end in time, and leave the others alone."""

import json
import os
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu import check, findings
from bench.gpu.aims import AIMS, aim_row, verdicts
from bench.gpu.check import Call, attempt, keeper_for, unfinished
from bench.gpu.findings import Keeper, together
from bench.gpu.stages import Stage, stages
from tests.processes import is_running, wait_for


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "BUILD", tmp_path / "gpu")
    monkeypatch.setattr(check, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(check, "WHEELS", tmp_path / "wheels")
    monkeypatch.delenv("OUT", raising=False)


def stage(name, command="true", usual_s=1, limit_s=60, **options):
    return Stage(name, command, usual_s, limit_s, **options)


def ran(tmp_path, command, limit_s=60.0, so_far=lambda: None):
    return attempt(
        stage("one", command), limit_s, so_far, environment=dict(os.environ), folder=tmp_path
    )


@pytest.mark.parametrize("dry", [False, True])
def test_every_bench_is_there_to_be_run(dry):
    known = stages(dry=dry)
    for one in known:
        for word in one.command.split():
            if word.startswith(("bench.gpu.", "tests.gpu.")):
                assert (check.ROOT / (word.replace(".", "/") + ".py")).is_file()
    names = [one.name for one in known]
    assert len(set(names)) == len(names)
    for one in known:
        assert one.usual_s <= one.limit_s
        assert set(one.after) <= set(names[: names.index(one.name)])


def test_a_stage_that_passes_and_one_that_fails(tmp_path):
    assert ran(tmp_path, "echo fine")["state"] == "ok"
    row = ran(tmp_path, "echo 'FAIL this: 1'; exit 3")
    assert (row["state"], row["failures"]) == ("FAILED", ["FAIL this: 1"])
    assert row["why"] == "exit code 3; 1 checks failed: FAIL this: 1"


def test_a_stage_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    told = tmp_path / "pid"

    def now():
        # Its time is over once it has begun, however long that takes.
        return 1000.0 if told.exists() and told.read_text().endswith("\n") else 0.0

    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    monkeypatch.setattr(check, "_KEEP_EVERY_S", 0.05)
    row = ran(tmp_path, f"sleep 1000 & echo $! > {told}; wait", 600.0)
    assert (row["state"], row["why"]) == ("FAILED", "over its time limit")
    pid = int(told.read_text())
    wait_for(lambda: not is_running(pid), "the end of what it started")


def test_what_a_stage_has_found_is_kept_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_KEEP_EVERY_S", 0.01)
    go = tmp_path / "go"
    row = ran(tmp_path, f"until [ -e {go} ]; do sleep 0.01; done", so_far=go.touch)
    assert row["state"] == "ok"


def test_one_stage_can_be_quick_by_itself():
    short = {one.name for one in stages(["gather"]) if one.quick}
    assert short == {"gather"}
    every = [one for one in stages(["all"]) if one.quick]
    assert all("--quick" in one.command for one in every)
    assert {one.name for one in every} == {one.name for one in stages(dry=True)}


class Machine:
    """Stages that take their time by a clock of their own, and find something."""

    def __init__(self, tmp_path, out=None):
        self.now, self.began = 0.0, []
        self.takes: dict[str, float] = {}
        self.fails: set[str] = set()
        self.keeper = keeper_for(out, dry=False)
        self.results = self.keeper.build / "results"
        self.results.mkdir(parents=True, exist_ok=True)

    def attempt(self, one, limit_s, so_far):
        self.began.append((one.name, limit_s))
        # Written bit by bit, as benches do.
        (self.results / f"{one.name}.json").write_text(json.dumps({"checks": [], "half": True}))
        (self.keeper.build / f"{one.name}.log").write_text(f"log of {one.name}\n")
        so_far()
        self.now += min(self.takes.get(one.name, 1.0), limit_s)
        (self.results / f"{one.name}.json").write_text(json.dumps({"checks": []}))
        return {"state": "FAILED" if one.name in self.fails else "ok"}

    def call(self, chosen, seconds, found=None):
        call = Call(self.keeper, self.now + seconds, self.attempt, lambda: self.now)
        return call.run(chosen, found or together([]))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def states(found):
    return {name: row["state"] for name, row in found["stages"].items()}


def test_a_stage_is_not_begun_with_less_time_left_than_it_usually_takes(machine):
    machine.takes = {"first": 30.0, "short": 5.0}
    chosen = [stage("first"), stage("long", usual_s=40), stage("short", usual_s=5, limit_s=20)]
    found, failed = machine.call(chosen, 50.0)
    # The first may take all there is at most; what is too long for the rest makes room.
    assert machine.began == [("first", 50.0), ("short", 20.0)]
    assert found["stages"]["long"]["why"] == "usually takes 40 s, 20 s are left"
    assert not failed


def test_nothing_is_begun_on_a_build_that_failed(machine):
    machine.fails = {"libraries"}
    chosen = [stage("libraries"), stage("arena", after=("libraries",)), stage("other")]
    found, failed = machine.call(chosen, 60.0)
    assert failed
    assert [name for name, _ in machine.began] == ["libraries", "other"]
    assert found["stages"]["arena"] == {
        "state": "not run", "why": "libraries: FAILED", "quick": False,
    }  # fmt: skip


def test_a_missing_module_or_program_is_told(machine):
    chosen = [stage("a", needs=("no_such_module",)), stage("b", programs=("no-such-program",))]
    found, _ = machine.call(chosen, 60.0)
    assert [row["why"] for row in found["stages"].values()] == [
        "needs no_such_module", "needs no-such-program",
    ]  # fmt: skip


def test_resuming_runs_what_prepares_then_what_is_new_then_what_failed(machine):
    known = [
        stage("build", prepares=True), stage("done"), stage("broken"), stage("hurried"),
        stage("new"),
    ]  # fmt: skip
    before = {
        "build": {"state": "ok"}, "done": {"state": "ok", "quick": False},
        "broken": {"state": "FAILED"}, "hurried": {"state": "ok", "quick": True},
        "new": {"state": "not run", "why": "no time"},
    }  # fmt: skip
    assert [one.name for one in unfinished(known, before)] == ["build", "new", "hurried", "broken"]


def test_every_stage_is_kept_where_it_outlasts_the_machine(tmp_path, monkeypatch):
    """The machine goes away while the second one runs."""
    out = tmp_path / "outlasts"
    monkeypatch.setenv("OUT", str(out))
    machine = Machine(tmp_path)
    (machine.keeper.build / "calibrations").mkdir()
    (machine.keeper.build / "calibrations" / "gcn.json").write_text("{}")

    class GoneError(BaseException):
        pass

    def attempt(one, limit_s, so_far):
        row = machine.attempt(one, limit_s, so_far)
        if one.name == "second":
            (machine.results / "second.json").write_text(json.dumps({"half": True}))
            so_far()
            raise GoneError
        return row

    with pytest.raises(GoneError):
        Call(machine.keeper, 60.0, attempt, lambda: 0.0).run(
            [stage("first"), stage("second")], together([])
        )
    found = json.loads((out / "gpu.json").read_text())
    assert states(found) == {"first": "ok", "second": "cut off"}
    assert found["results"] == {"first": {"checks": []}, "second": {"half": True}}
    with tarfile.open(out / "logs.tar.gz") as file:
        assert file.getnames() == ["first.log", "second.log"]
    # The next machine has nothing but that folder.
    other = keeper_for(tmp_path / "next", dry=False)
    other = Keeper(tmp_path / "other", tmp_path / "other" / "result.json", other.folder, True)
    assert other.take(out) == found
    assert (tmp_path / "other" / "calibrations" / "gcn.json").read_text() == "{}"


def test_few_and_small_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "_LOG_BYTES", 4)
    machine = Machine(tmp_path, tmp_path / "out")
    machine.call([stage("a"), stage("b"), stage("c")], 60.0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "calibrations.tar.gz", "gpu.json", "logs.tar.gz",
    ]  # fmt: skip
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as file:
        assert {member.size for member in file.getmembers()} == {4}


def test_without_a_place_that_lasts_the_findings_go_to_the_results(machine, tmp_path):
    machine.call([stage("a")], 60.0)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["gpu.json"]


def test_a_stage_that_was_not_run_again_stays_as_it_was(machine):
    before, _ = machine.call([stage("a")], 60.0)
    found, _ = machine.call([stage("a", usual_s=99)], 60.0, before)
    assert found == before


def wheel(folder: Path, name: str, content: str) -> None:
    """A wheel of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", content)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_a_wheel_that_does_not_fit_is_told_and_keeps_no_other_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.path", list(check.sys.path))
    wheel(tmp_path / "wheels", "brought_along", "")
    (tmp_path / "wheels" / "another-1.0-cp27-none-any.whl").write_bytes(b"")
    environment = check.prepare(tmp_path / "site")
    assert "FAIL another-1.0-cp27-none-any.whl cannot be installed" in capsys.readouterr().out
    assert check.importable("brought_along")
    assert str(tmp_path / "site") in environment["PYTHONPATH"].split(os.pathsep)


def test_stages_keep_what_python_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(check.sys.path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = check.prepare(tmp_path / "site")
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["PYTHONPYCACHEPREFIX"] == str(tmp_path / "compiled")


def test_what_to_bring_along_is_told_before_anything_runs(capsys):
    check.tell_missing([stage("a"), stage("b", needs=("no_such_module", "json"))])
    said = capsys.readouterr().out
    assert "without no_such_module these are not run: b." in said
    assert said.rstrip().endswith("-d .whl no-such-module")


def test_the_sanitizer_sees_where_each_tensor_ends():
    """Memory of an arena or a cache would hide what is read beside a tensor."""
    for tool in ("memcheck", "racecheck"):
        (one,) = [one for one in stages() if one.name == tool]
        assert one.command.startswith("PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer")
        assert "--plain" in one.command.split()
        assert one.programs == ("compute-sanitizer",)


def test_cuda_is_compiled_once_and_for_the_gpu_at_hand(monkeypatch):
    class Said:
        stdout = "9.0\n"

    monkeypatch.setattr("bench.kit.machine.subprocess.run", lambda *_, **__: Said)
    commands = [one.command for one in stages()]
    assert sum("-DCMAKE_CUDA_ARCHITECTURES=90-real" in command for command in commands) == 1
    assert sum("GNNSERVE_CUDA=ON" in command for command in commands) == 1


def found(stage, state, *aims):
    row = {"state": state}
    return {"stages": {stage: row}, "results": {stage: {"aims": list(aims)}}}


def test_what_several_calls_found_becomes_one_file_and_a_line_for_each_aim(
    tmp_path, monkeypatch, capsys
):
    files = []
    for number, one in enumerate(
        (
            found("gather", "FAILED", aim_row(11, False, 0.5)),
            found("pmc", "ok", aim_row(4, True, 0.01), aim_row(4, False, 0.03)),
            found("gather", "ok", aim_row(11, True, 0.95)),
        )
    ):
        files.append(tmp_path / f"{number}.json")
        check.write(one, files[-1])
    out = tmp_path / "all"
    monkeypatch.setattr("sys.argv", ["check", "--out", str(out), "--merge", *map(str, files)])
    assert check.main() == 0
    assert "<h2>Aims</h2>" in (out / "gpu.html").read_text()
    merged = json.loads((out / "gpu.json").read_text())
    assert {name: row["state"] for name, row in merged["stages"].items()} == {
        "gather": "ok",
        "pmc": "ok",
    }
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("AIM")]
    assert len(lines) == len(AIMS)
    by_number = dict(zip(AIMS, lines, strict=True))
    assert by_number[11].startswith("AIM 11 PASS [0.95]: features gathered in place")
    assert by_number[4].startswith("AIM  4 MISS 1 of 2 [0.03]: PMC within")
    assert by_number[1].startswith("AIM  1 not measured: answers")


def test_no_aim_passes_by_a_stage_that_failed():
    """It may have measured the easy half."""
    row = aim_row(11, True, 0.95)
    whole = {"gather": {"aims": [row], "checks": [{"what": "right", "passed": True}]}}
    broken = {"gather": {"aims": [row], "checks": [{"what": "right", "passed": False}]}}

    def line(results, stages):
        return next(str(one) for one in verdicts(results, stages) if one.number == 11)

    assert line(whole, {"gather": {"state": "ok"}}).startswith("AIM 11 PASS [0.95]:")
    assert line(broken, {}).startswith("AIM 11 MISS [0.95] (1 checks of gather failed):")
    for state in ("FAILED", "cut off"):
        said = line(whole, {"gather": {"state": state}})
        assert said.startswith(f"AIM 11 MISS [0.95] (gather: {state}):")


def test_an_aim_of_which_a_stage_tells_nothing_is_reached_in_part():
    results = {"equality": {"aims": [aim_row(1, True, {"worst": 7.5e-7})]}}
    said = next(verdicts(results, {"equality": {"state": "ok", "quick": True}}))
    found = "[worst: 7.5e-07] (serving_equality: nothing yet, quick run)"
    assert (said.word, said.found) == ("PART", found)
    results["serving_equality"] = {"aims": [aim_row(1, True, {"slack, rolling": 0.0})]}
    assert next(verdicts(results)).word == "PASS"


def test_a_result_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "good.json").write_text('{"checks": []}')
    (tmp_path / "cut.json").write_text('{"checks": [')
    assert set(check.read(tmp_path)) == {"good"}


def test_the_page_tells_every_aim():
    page = (check.ROOT / "docs" / "measurements" / "gpu.md").read_text()
    for number, aim in AIMS.items():
        told = ", ".join(f"`{name}`" for name in aim.stages)
        assert f"| {number} | {aim.what} | {told} |" in page
    known = {stage.name for stage in stages()}
    assert all(known.issuperset(aim.stages) for aim in AIMS.values())
