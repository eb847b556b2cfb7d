"""What changes a cluster by itself: figures read from a report, trials and scaling of a pool."""

import dataclasses
import errno
import re
import sqlite3
import time
from contextlib import closing

import msgspec
import pytest

from bench.kit.waiting import wait_for
from serve.cluster.coordinator import Coordinator
from serve.cluster.figures import FigureReader, Figures
from serve.cluster.pool import PoolKeeper, bounds_of, digest_of, update_of
from serve.cluster.registry import SeatGiven, Standing
from serve.cluster.replica import FOLDER_VARIABLE, Replica, ReplicaSpec
from serve.cluster.servers_file import read_servers, write_servers
from serve.cluster.stores_file import read_stores
from serve.cluster.supervised import Supervised
from serve.core.cluster.seats import OwnSeat, SeatAsked
from serve.core.versions.comparison import LEAST
from serve.errors import ConfigError
from serve.files import replace_file
from serve.obs.store import RecordStore
from tests.cluster.pools import NEW, OLD, ON_TRIAL, POOL, S, announced
from tests.obs.builders import MS, RUN, START_UNIX_NS, late, record, unanswered

NOW_S = START_UNIX_NS // S


def test_figures_are_sums_over_the_seconds_that_are_over(tmp_path):
    store = RecordStore(tmp_path / "r.db", RUN)
    reader = FigureReader(tmp_path / "r.db", NOW_S)
    assert FigureReader(tmp_path / "none.db", NOW_S).read(NOW_S + 60) == Figures()
    for row in (
        record("before", arrived_unix_ns=START_UNIX_NS - 1000 * MS),
        record("kept"),
        late("late"),
        late("slow", cause="estimate"),
        unanswered("full", "RESOURCE_EXHAUSTED", "queue_full"),
        unanswered("gone", "CANCELLED", "cancelled"),
        unanswered("expired", "DEADLINE_EXCEEDED", "deadline"),
        unanswered("no model", "NOT_FOUND", ""),
    ):
        store.count(row, NOW_S)
    store.count(record("next", arrived_unix_ns=START_UNIX_NS + 1000 * MS), NOW_S + 1)
    store.commit(NOW_S + 1)
    run_ns = record().run_ns
    found = reader.read(NOW_S + 4)
    assert (found.ended, found.late, found.failed, found.crowded) == (6, 3, 2, 2)
    assert (found.run_ns, found.cores) == (3 * run_ns, RUN.lanes)
    assert reader.read(NOW_S + 4) == found
    later = reader.read(NOW_S + 5)
    assert (later.ended, later.run_ns) == (7, 4 * run_ns)
    with closing(sqlite3.connect(tmp_path / "r.db")) as db:
        db.execute("PRAGMA user_version = 99")
    assert reader.read(NOW_S + 60) == later
    store.close()


def test_an_update_that_does_worse_is_taken_back():
    keeper = PoolKeeper(ON_TRIAL, 0)
    assert keeper.goes_on("2") is None
    assert "on trial" in keeper.told
    for at, done in enumerate((0, LEAST)):
        keeper.take(announced("a", ended=done), at * S)
        keeper.take(announced("b", "2", ended=done, failed=done), at * S)
    assert keeper.change(2, 2 * S)
    reason = keeper.pool.taken_back
    assert f"{LEAST} of its last {LEAST} requests failed" in reason
    assert keeper.pool == msgspec.structs.replace(
        POOL, trial_s=60.0, digest_before="old", taken_back=reason
    )
    assert keeper.goes_on("2") is False
    assert keeper.goes_on("") is True
    assert not keeper.change(2, 3 * S)


def test_an_update_that_does_as_well_is_kept_after_its_trial():
    keeper = PoolKeeper(ON_TRIAL, 0)
    for at, done in enumerate((0, 500)):
        keeper.take(announced("a", ended=done), at * S)
        keeper.take(announced("b", "2", ended=done), at * S)
    assert not keeper.change(2, 30 * S)
    assert keeper.goes_on("2") is None
    assert not keeper.change(2, 61 * S)
    assert keeper.goes_on("2") is True
    assert (keeper.pool.spec, keeper.pool.before, keeper.told) == (NEW, None, "")


def test_a_server_that_does_not_start_ends_the_trial_of_its_update_alone():
    keeper = PoolKeeper(ON_TRIAL, 0)
    assert not keeper.not_started("1", "an earlier one")
    assert keeper.not_started("2", "no such key")
    assert keeper.pool.taken_back == "a server did not start with it: no such key"
    assert keeper.pool.spec == OLD
    assert not PoolKeeper(POOL, 0).not_started("", "nothing is on trial")


def test_a_pool_that_follows_load_grows_and_one_that_does_not_stays():
    busy = [announced("a", ended=100 * i, run_ns=i * S) for i in range(60)]
    for pool, wanted in ((msgspec.structs.replace(POOL, replicas=1, least=1, most=3), 2),
                         (msgspec.structs.replace(POOL, replicas=1), 1)):  # fmt: skip
        keeper = PoolKeeper(pool, 0)
        changes = 0
        for at, said in enumerate(busy):
            keeper.take(said, at * S)
            changes += keeper.change(1, at * S)
        assert (keeper.pool.replicas, changes) == (wanted, wanted - 1)


def test_an_update_knows_what_it_would_be_taken_back_to(tmp_path):
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text("1")
    new.write_text("2")
    spec = ReplicaSpec("c", str(old))
    pool = msgspec.structs.replace(POOL, spec=spec, digest=digest_of(str(old)))
    after = ReplicaSpec("c", str(new), generation="2")
    found = update_of(pool, after, 60.0)
    assert (found.spec, found.before, found.trial_s) == (after, spec, 60.0)
    # Another one gives way to the first, and neither has a trial where one server is alone.
    again = msgspec.structs.replace(after, generation="3")
    assert update_of(found, again, 60.0).before == spec
    for alone, trial_s in ((msgspec.structs.replace(pool, replicas=1), 60.0), (pool, 0.0)):
        assert update_of(alone, after, trial_s).before is None
    old.write_text("3")
    same = msgspec.structs.replace(spec, generation="2")
    with pytest.raises(ConfigError, match="has changed since the servers were started"):
        update_of(pool, same, 60.0)
    assert update_of(pool, same, 0.0).digest == digest_of(str(old))
    with pytest.raises(ConfigError, match="--trial: 3600 s is longer than 1800 s"):
        update_of(pool, after, 3600.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        digest_of(str(tmp_path / "none.toml"))


def test_servers_start_anew_for_what_they_are_started_with_alone():
    same = msgspec.structs.replace(
        POOL, replicas=5, least=1, most=9, before=NEW, trial_s=1.0, taken_back="x", port=2
    )
    assert same.version == POOL.version
    for other in ({"spec": NEW}, {"digest": "x"}, {"cpus": 2.0}, {"gpus": 1.0}):
        assert msgspec.structs.replace(POOL, **other).version != POOL.version


@pytest.mark.parametrize(("said", "bounds"), [("3", (3, 3)), ("2..6", (2, 6)), ("4..4", (4, 4))])
def test_numbers_of_servers_and_bounds(said, bounds):
    assert bounds_of(said) == bounds


@pytest.mark.parametrize("said", ["0", "-1", "x", "3..2", "0..2", "1..", "..2", "1..2..3", "²"])
def test_what_are_no_numbers_of_servers_is_refused(said):
    with pytest.raises(ConfigError, match="--replicas"):
        bounds_of(said)


def test_a_coordinator_deploys_anew_until_it_succeeds_and_remembers(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("serve.cluster.rollout.DEPLOY_AGAIN_NS", 0)
    monkeypatch.setattr(Coordinator, "_keep_front", lambda self, pool: None)
    deployed, failures = [], [OSError("Ray is busy")]

    def deploy(pool):
        if failures:
            raise failures.pop()
        deployed.append(pool)

    coordinator = Coordinator("c", deploy)
    coordinator.keep(ON_TRIAL)
    assert coordinator.goes_on("2") is None
    coordinator.not_started("2", "no such key")
    wait_for(lambda: deployed, "a deployment")
    assert [pool.spec for pool in deployed] == [OLD]
    assert coordinator.goes_on("2") is False
    told = ("", "a server did not start with it: no such key")
    wait_for(lambda: coordinator.trial() == told, "it to be done")
    wait_for(lambda: b"new.toml" not in (tmp_path / "c" / "pool.json").read_bytes(), "the file")
    # What is on trial ends before Serve is told of another.
    coordinator.keep(ON_TRIAL)
    on_trial = announced("b", "2")
    coordinator.announce(on_trial)
    coordinator.not_started("2", "once more")
    assert not coordinator.is_settled()
    assert len(deployed) == 1
    coordinator.left(on_trial.address, on_trial.incarnation)
    wait_for(lambda: len(deployed) == 2, "a second deployment")
    assert coordinator.is_settled()
    coordinator.keep(ON_TRIAL)
    coordinator.announce(on_trial)
    coordinator.leave_alone()
    assert coordinator.goes_on("2") is False
    assert not coordinator.is_settled()
    coordinator.not_started("2", "it ends")
    assert len(deployed) == 2
    coordinator.end()


def test_the_front_of_a_cluster_has_the_key_that_its_configuration_names(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    started = []
    monkeypatch.setattr(Supervised, "start", lambda _, command, *rest: started.append(command))
    config = tmp_path / "gnnserve.toml"
    spec = msgspec.structs.replace(ON_TRIAL.spec, config=str(config), settings=())
    pool = msgspec.structs.replace(ON_TRIAL, spec=spec)
    coordinator = Coordinator("c", lambda pool: None)
    try:
        for content in ('[cluster]\nfront_key_file = "key"\n', "", "no TOML"):
            config.write_text(content)
            coordinator._start_front(pool)
    finally:
        coordinator.end()
    with_key, *others = started
    assert with_key[-2:] == ["--key-file", str(tmp_path / "key")]
    assert all("--key-file" not in command for command in others)
    assert len(others) == 2


def test_servers_learn_of_each_other_and_one_on_trial_of_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Coordinator, "_keep_front", lambda self, pool: None)
    coordinator = Coordinator("c", lambda pool: None)
    first, second = announced("a"), announced("b")
    try:
        assert coordinator.announce(first) == Standing(False, ["a:1"], [])
        assert coordinator.announce(second) == Standing(False, ["a:1", "b:1"], [])
        coordinator.drain("a")
        assert coordinator.announce(first) == Standing(True, ["a:1", "b:1"], ["a:1"])
        coordinator.keep(ON_TRIAL)
        assert coordinator.announce(announced("b", "2")) == Standing(False, [], [])
        assert coordinator.announce(first).servers == ["a:1", "b:1"]
    finally:
        coordinator.end()


def test_a_full_disk_keeps_servers_from_the_front_no_longer_than_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Coordinator, "_keep_front", lambda self, pool: None)
    is_full = True

    def write(*given):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_servers(*given)

    monkeypatch.setattr("serve.cluster.coordinator.write_servers", write)
    coordinator = Coordinator("c", lambda pool: None)
    try:
        coordinator.keep(POOL)
        coordinator.announce(announced("a"))
        wait_for(lambda: "No space left on device" in coordinator.problem(), "the problem")
        is_full = False
        wait_for(lambda: not coordinator.problem(), "the file")
        assert read_servers(tmp_path / "c" / "servers") == (["a:1"], [])
    finally:
        coordinator.end()


def test_a_server_is_told_of_the_others_by_a_file_of_its_own(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(Supervised, "start", lambda _, command, *rest: started.append(command))
    config = tmp_path / "gnnserve.toml"
    config.write_text('[cluster]\nname = "web"\nservers_file = "by hand"\n')
    replica = Replica(ReplicaSpec("c", str(config)), "127.0.0.1", tmp_path / "own")
    with pytest.raises(ConfigError, match="the server did not start"):
        replica.start()
    address, (command,) = replica.running.address, started
    file = tmp_path / "own" / "servers"
    assert f"cluster.servers_file={file}" in command
    assert f"cluster.name=web@{address}" in command
    assert read_servers(file) == ([address], [])
    replica.know([address, "b:1"], ["b:1"])
    assert read_servers(file) == ([address, "b:1"], ["b:1"])
    written = file.stat()
    replica.know([address, "b:1"], ["b:1"])
    assert file.stat() == written
    file.unlink()
    (tmp_path / "own" / "servers").mkdir()
    replica.know([address])  # it cannot be written now
    file.rmdir()
    replica.know([address])
    assert read_servers(file) == ([address], [])


def test_a_full_disk_keeps_no_server_that_has_a_part_from_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Coordinator, "_keep_front", lambda self, pool: None)
    is_full, write = True, replace_file

    def replace(file, data):
        if is_full and file.name == "seats.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr("serve.cluster.coordinator.replace_file", replace)
    coordinator = Coordinator("c", lambda pool: None)
    seat = OwnSeat(0, 0, "a:5")
    try:
        coordinator.keep(msgspec.structs.replace(POOL, parts=1))
        asked = SeatAsked("a", "a:5", has_log=True)
        assert "No space left on device" in coordinator.take_seat(asked)
        is_full = False
        assert coordinator.take_seat(asked) == SeatGiven(seat, [("a:5", 0)])
        is_full = True
        said = msgspec.structs.replace(announced("a"), seat=seat, ready=True)
        assert coordinator.announce(said).stores == [("a:5", 0)]
        wait_for(lambda: "No space left on device" in coordinator.problem(), "the problem")
        coordinator.leave_seat("a:5")
        is_full = False
        wait_for(lambda: not coordinator.problem(), "the file")
        assert b'"left":true' in (tmp_path / "c" / "seats.json").read_bytes()
    finally:
        coordinator.end()


def test_servers_of_shared_graphs_get_parts_that_a_coordinator_remembers(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Coordinator, "_keep_front", lambda self, pool: None)
    pool = msgspec.structs.replace(POOL, parts=2)
    first, second = SeatAsked("a", "a:5", has_log=True), SeatAsked("b", "b:5")
    both = [("a:5", 0), ("b:5", 1)]
    coordinator = Coordinator("c", lambda pool: None)
    try:
        assert coordinator.take_seat(first) == "no graph of the cluster is shared out"
        coordinator.keep(pool)
        assert coordinator.take_seat(first) == SeatGiven(OwnSeat(0, 0, "a:5"), [])
        assert coordinator.take_seat(second) == SeatGiven(OwnSeat(1, 1, "b:5"), both)
        said = msgspec.structs.replace(announced("a"), seat=OwnSeat(0, 0, "a:5"))
        standing = coordinator.announce(said)
        assert (standing.stores, standing.seated) == (both, True)
        assert coordinator.rows()[0].part == 0
        coordinator.leave_seat("b:5")
        coordinator.keep(pool)
        other = Coordinator("c", lambda pool: None)  # it was lost, and comes back
        try:
            third = SeatAsked("d", "d:5")
            changed = [("a:5", 0), ("d:5", 1)]
            assert other.take_seat(third) == SeatGiven(OwnSeat(1, 1, "d:5"), changed)
            late = msgspec.structs.replace(announced("b"), seat=OwnSeat(1, 1, "b:5"))
            assert not other.announce(late).seated
            assert other.announce(said).stores == changed
        finally:
            other.end()
    finally:
        coordinator.end()


@pytest.mark.parametrize("lost", ["pool", "known", "seats"])
def test_a_coordinator_starts_with_a_file_that_lost_power_emptied(tmp_path, monkeypatch, lost):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Coordinator, "_keep_front", lambda self, pool: None)
    pool = msgspec.structs.replace(POOL, parts=1, replicas=1)
    for name, said in (("pool", pool), ("known", [announced("a")]), ("seats", [])):
        file = tmp_path / "c" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"" if name == lost else msgspec.json.encode(said))
    coordinator = Coordinator("c", lambda pool: None)
    try:
        coordinator.keep(pool)
        given = coordinator.take_seat(SeatAsked("a", "a:5", has_log=False))
        # Who had the log is forgotten with the seats.
        assert isinstance(given, str) == (lost == "seats")
        assert isinstance(coordinator.take_seat(SeatAsked("a", "a:5", has_log=True)), SeatGiven)
    finally:
        coordinator.end()


def test_a_later_server_is_later_whatever_the_clock_says(tmp_path, monkeypatch):
    monkeypatch.setattr(Supervised, "start", lambda self, _, version, lease_s: said.append(version))
    monkeypatch.setattr(Supervised, "version", property(lambda _: said[-1]))
    said = [""]
    (tmp_path / "gnnserve.toml").touch()
    spec = ReplicaSpec("c", str(tmp_path / "gnnserve.toml"))
    found = []
    for now_ns in (10**18, 10**18 - 10**9, 10**18 + 10**9):
        monkeypatch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
        replica = Replica(spec, "127.0.0.1", tmp_path / "own")
        with pytest.raises(ConfigError, match="the server did not start"):
            replica.start()
        found.append(replica.running.incarnation)
    assert found == [10**18, 10**18 + 1, 10**18 + 10**9]


def test_an_ipv6_machine_is_named_in_brackets(tmp_path, monkeypatch):
    monkeypatch.setattr(Supervised, "start", lambda *_: None)
    config = tmp_path / "gnnserve.toml"
    config.write_text(
        'server = { host = "::1", grpc_port = 0, http_port = 0 }\n'
        '[cluster.rows]\nlisten = "[::1]:0"\n'
        '[[graph]]\nname = "g"\nfile = "g"\nparts = "parts.npy"\n'
    )
    replica = Replica(ReplicaSpec("c", str(config)), "::1", tmp_path / "own")
    assert re.fullmatch(r"\[::1\]:\d+", replica.seat_asked("a").address)
    with pytest.raises(ConfigError, match="the server did not start"):
        replica.start()
    for address in (replica.running.address, replica.running.http_address):
        assert re.fullmatch(r"\[::1\]:\d+", address)


def test_a_server_starts_with_the_part_that_it_was_given(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(Supervised, "start", lambda _, command, *rest: started.append(command))
    config = tmp_path / "gnnserve.toml"
    config.write_text(
        '[cluster.rows]\nlisten = "127.0.0.1:0"\n'
        '[[graph]]\nname = "g"\nfile = "g"\nparts = "parts.npy"\n'
    )
    replica = Replica(ReplicaSpec("c", str(config)), "127.0.0.1", tmp_path / "own")
    assert replica.needs_seat
    asked = replica.seat_asked("a")
    assert (asked.machine, asked.has_log, asked.held) == ("a", False, None)
    (tmp_path / "changes.log").touch()
    assert replica.seat_asked("a") == dataclasses.replace(asked, has_log=True)
    seat = OwnSeat(1, 1, asked.address)
    replica.sit(seat, [("127.0.0.1:1", 0), (asked.address, 1)])
    with pytest.raises(ConfigError, match="the server did not start"):
        replica.start()
    (command,) = started
    assert replica.running.seat == seat
    stores = tmp_path / "own" / "stores"
    assert {
        "cluster.rows.part=1",
        f"cluster.rows.listen={asked.address}",
        f"cluster.rows.address={asked.address}",
        f"cluster.rows.servers_file={stores}",
    } <= set(command)
    assert read_stores(stores) == {"127.0.0.1:1": 0, asked.address: 1}
    replica.know_stores([])  # nobody knows, so it stays
    replica.know_stores([("127.0.0.1:2", 0), (asked.address, 1)])
    assert list(read_stores(stores)) == ["127.0.0.1:2", asked.address]
    # It runs, and another process of Ray finds it.
    version = msgspec.json.encode(replica.running).decode()
    monkeypatch.setattr(Supervised, "pid", 1)
    monkeypatch.setattr(Supervised, "version", version)
    found = Replica(ReplicaSpec("c", str(config)), "127.0.0.1", tmp_path / "own")
    assert found.seat_asked("a") == SeatAsked("a", asked.address, has_log=True, held=1)
