"""Changes of a shared graph: sent to any server, made by all in one order, kept over restarts."""

import socket
import threading
import time
from contextlib import suppress

import msgspec
import numpy as np
import pytest

zmq = pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from bench.kit.servers import free_ports  # noqa: E402
from bench.kit.waiting import PATIENCE_S, wait_for  # noqa: E402
from serve.cluster import row_wire, submitting  # noqa: E402
from serve.cluster.change_wire import MARK, Ask  # noqa: E402
from serve.cluster.submitting import Submitter  # noqa: E402
from serve.errors import ConfigError, InvalidInput, Mismatch, NotReady, TooBig  # noqa: E402
from serve.graphs.change_bytes import decode_change, encode_change  # noqa: E402
from serve.graphs.updates import Change  # noqa: E402
from tests.cluster.sharing import FEATURES, NODES, cluster, parts_of_graph  # noqa: E402

ALL = np.arange(NODES)


def all_are(value):
    return Change(set_ids=ALL, set_x=np.full((NODES, FEATURES), value, np.float32))


def change(servers, number, made, if_version=None):
    return servers.rows[number].changes.change("made", made, if_version)


def test_a_change_sent_to_any_server_is_made_by_all(tmp_path):
    with cluster(tmp_path, 3) as three:
        three.order_changes()
        for number in (1, 0, 2):
            assert change(three, number, all_are(number)).version == 2 + (1, 0, 2).index(number)
            # Who made it answers once all have made it.
            for graph in three.graphs:
                np.testing.assert_array_equal(graph.snapshot.features(ALL), number)
        more = Change(add_x=np.ones((2, FEATURES), np.float32), add_edges=np.array([[0], [NODES]]))
        assert change(three, 2, more).num_nodes == NODES + 2
        assert all(graph.snapshot.num_nodes == NODES + 2 for graph in three.graphs)


def test_what_is_wrong_with_a_change_is_told_to_who_sent_it(tmp_path):
    with cluster(tmp_path, 2) as two:
        two.order_changes(log_bytes=10_000)
        with pytest.raises(InvalidInput, match="tensor 'set_ids'"):
            change(two, 1, Change(set_ids=np.array([NODES]), set_x=np.ones((1, FEATURES), "f")))
        change(two, 1, all_are(1))
        with pytest.raises(Mismatch, match="is at version 2, the change is for version 1"):
            change(two, 1, all_are(2), if_version=1)
        for value in range(4):
            change(two, 1, all_are(value))
        with pytest.raises(TooBig, match="the log of changes is full: .*cluster.rows.log_size"):  # noqa: RUF043
            change(two, 1, all_are(9))
        versions = {graph.snapshot.version for graph in two.graphs}
        assert len(versions) == 1
        counted = two.rows[0].told().changes
        assert (counted.made, counted.in_step) == (versions.pop() - 1, True)
        assert 8000 < counted.log_bytes <= 10_000


def test_a_change_larger_than_a_message_is_refused_with_its_size(tmp_path):
    with cluster(tmp_path, 2) as two:
        two.order_changes()
        large = np.zeros((row_wire.MOST_BYTES // (4 * FEATURES) + 1, FEATURES), np.float32)
        with pytest.raises(TooBig, match="send it as several"):
            change(two, 1, Change(add_x=large))
        assert change(two, 1, all_are(1)).version == 2


def test_servers_that_start_anew_make_all_changes_before_they_serve(tmp_path):
    with cluster(tmp_path, 2) as two:
        two.order_changes()
        for value in range(5):
            change(two, value % 2, all_are(value))
        for number in (1, 0):
            two.restart(number)
            assert two.graphs[number].snapshot.version == 1
            two.order_changes(numbers=[number])
            assert two.graphs[number].snapshot.version == 6
            np.testing.assert_array_equal(two.graphs[number].snapshot.features(ALL), 4)
        change(two, 1, all_are(9))
        for graph in two.graphs:
            np.testing.assert_array_equal(graph.snapshot.features(ALL), 9)


def test_without_the_sequencer_changes_are_refused_and_reads_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(submitting, "_CONNECT_S", 0.3)
    with cluster(tmp_path, 2, replicas=2, patience_ms=2000) as four:
        four.order_changes()
        change(four, 1, all_are(1))
        four.rows[0].close()
        for _ in range(2):
            with pytest.raises(NotReady, match=f"{four.addresses[0]}, the sequencer of changes, "):
                change(four, 1, all_are(2))
        counted = four.rows[1].told().changes
        assert (counted.made, counted.behind, counted.log_bytes) == (1, 0, 0)
        for graph in four.graphs[1:]:
            assert graph.snapshot.version == 2
            np.testing.assert_array_equal(graph.snapshot.features(ALL), 1)
        four.restart(0)
        four.order_changes(numbers=[0])
        # A change is made again, without anybody else's doing.
        assert change(four, 1, all_are(3)).version == 3


def test_servers_that_take_the_place_of_others_are_found_by_the_file(tmp_path):
    with cluster(tmp_path, 2, replicas=2) as four:
        four.order_changes()
        change(four, 1, all_are(1))
        # The sequencer is replaced elsewhere, with its log, and so is who holds the other part.
        for number in (0, 3):
            four.rows[number].close()
            four.addresses[number] = f"127.0.0.1:{free_ports(1)[0]}"
        lines = [f"{address} {n % 2}\n" for n, address in enumerate(four.addresses)]
        (tmp_path / "stores").write_text("".join(lines))
        for number in (0, 3):
            four.restart(number)
        for number in (1, 2):
            four.rows[number].reload()
        four.order_changes(numbers=[0, 3])
        assert change(four, 1, all_are(2)).version == 3
        assert change(four, 3, all_are(3)).version == 4
        four.rows[1].close()
        four.rows[2].close()
        for number in (0, 3):  # each has to ask the other
            np.testing.assert_array_equal(four.graphs[number].snapshot.features(ALL), 3)


def test_a_file_that_names_another_sequencer_does_not_make_two(tmp_path, caplog):
    with cluster(tmp_path, 2) as two:
        two.order_changes()
        two.addresses.reverse()
        lines = [f"{address} {1 - n}\n" for n, address in enumerate(two.addresses)]
        (tmp_path / "stores").write_text("".join(lines))
        for rows in two.rows:
            rows.reload()
        assert caplog.text.count("until it starts anew") == 2
        assert change(two, 1, all_are(1)).version == 2
        (tmp_path / "stores").write_text("nonsense")
        two.rows[0].reload()
        assert "stay as they were" in caplog.text
        assert change(two, 0, all_are(2)).version == 3


def test_a_server_that_lost_touch_makes_what_it_missed(tmp_path):
    with cluster(tmp_path, 2) as two:
        two.order_changes()
        two.rows[0].close()
        two.restart(0)
        two.order_changes(numbers=[0])
        change(two, 0, all_are(7))
        wait_for(lambda: two.graphs[1].snapshot.version == 2, "the follower to make the change")
        np.testing.assert_array_equal(two.graphs[1].snapshot.features(ALL), 7)


def test_servers_of_another_log_or_other_files_do_not_follow(tmp_path):
    with cluster(tmp_path, 2) as two:
        two.order_changes()
        change(two, 1, all_are(1))
        two.restart(0)
        (tmp_path / "changes.log").unlink()
        two.order_changes(numbers=[0])
        follower = two.rows[1].changes
        wait_for(lambda: follower.trouble, "the follower to hear of it")
        assert "made 1 changes that the sequencer does not know of" in follower.trouble
        with pytest.raises(NotReady, match="this server makes no changes of other servers"):
            change(two, 1, all_are(2))
        change(two, 0, all_are(3))
        two.graph.edge_index[0, 0] ^= 1
        two.restart(0)
        with pytest.raises(ConfigError, match="change 1 cannot be made: graph 'made': other files"):
            two.order_changes(numbers=[0])


def test_a_server_that_its_file_does_not_name_takes_no_part(tmp_path):
    with cluster(tmp_path, 2) as two, pytest.raises(ConfigError, match="name this server, here:1"):
        two.rows[0].order_changes("here:1", tmp_path / "log", 1000)


def test_whatever_is_sent_the_sequencer_goes_on(tmp_path):
    with cluster(tmp_path, 2) as two, zmq.Context() as context:
        two.order_changes()
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://{two.addresses[0]}")
        ask = msgspec.msgpack.encode(Ask("nobody:1", 0, b"", False))
        far = msgspec.msgpack.encode(Ask(two.addresses[1], -5, b"\xff", True))
        for frames in ([], [b""], [b"", b"", b""], [b"junk", b""], [ask, b""], [far, b"x" * 99]):
            asker.send_multipart([MARK, *frames])
        assert change(two, 1, all_are(1)).version == 2
        asker.close(0)


def test_many_at_once_on_all_servers_are_made_in_one_order(tmp_path):
    """Each change is for the version that its sender saw, so that of two only one can be made."""
    with cluster(tmp_path, 3) as three:
        three.order_changes()
        won = []

        def send(number):
            for _ in range(15):
                version = three.graphs[number].snapshot.version
                try:
                    change(three, number, all_are(100 * version + number), if_version=version)
                    won.append((version, number))
                except Mismatch:
                    time.sleep(0)

        threads = [threading.Thread(target=send, args=(number,)) for number in (0, 1, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        versions = [version for version, _ in won]
        assert sorted(versions) == list(range(1, len(won) + 1))
        version, number = max(won)
        for graph in three.graphs:
            assert graph.snapshot.version == version + 1
            np.testing.assert_array_equal(graph.snapshot.features(ALL), 100 * version + number)


def test_a_change_is_the_same_after_it_went_over_the_wire():
    graph = parts_of_graph()
    sent = Change(
        add_x=graph.x[:3],
        set_ids=ALL[:2],
        set_x=graph.x[:2],
        remove_edges=graph.edge_index[:, :4],
        add_edges=graph.edge_index[:, :1],
    )
    for one in (sent, Change()):
        found = decode_change(encode_change(one))
        for name in ("add_x", "set_ids", "set_x", "remove_edges", "add_edges"):
            np.testing.assert_array_equal(getattr(found, name), getattr(one, name))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc0", b"\x81\xa1x\x92\x90\xc4\x00", b"\x81\xa5add_x\x92\x91\x01\xc4\x00",
     b"\x81\xa7set_ids\x92\x91\x05\xc4\x03abc", b"\x81\xa7set_ids\x92\x91\xff\xc4\x00"],
)  # fmt: skip
def test_bytes_that_are_no_change_are_refused(data):
    with pytest.raises(InvalidInput, match="no change"):
        decode_change(data)


def test_among_restarts_no_answered_change_is_lost_and_none_is_made_twice(tmp_path):
    """Each change adds a node whose features are its number, so the graph tells what was made."""
    with cluster(tmp_path, 3) as three:
        three.order_changes()
        answered, ended = [], threading.Event()

        def send(number, value):
            while not ended.is_set():
                value += 10
                row = np.full((1, FEATURES), value, np.float32)
                order = three.rows[number].changes
                try:
                    if order is not None:
                        order.change("made", Change(add_x=row), None)
                        answered.append(value)
                except NotReady:
                    time.sleep(0.01)

        senders = enumerate((0, 1, 1, 2))
        threads = [threading.Thread(target=send, args=(to, value)) for value, to in senders]
        for thread in threads:
            thread.start()
        try:
            for number in (1, 0, 2):
                wanted = len(answered) + 5
                wait_for(lambda wanted=wanted: len(answered) >= wanted, "changes to be made")
                three.restart(number)
                three.order_changes(numbers=[number])
        finally:
            ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        last = change(three, 2, all_are(0)).version
        for graph in three.graphs:
            wait_for(lambda graph=graph: graph.snapshot.version == last, "all to have all changes")
            found = graph.snapshot
            added = found.features(np.arange(NODES, found.num_nodes))[:, 0].astype(int).tolist()
            assert len(set(added)) == len(added)
            assert set(answered) <= set(added)


def test_a_sequencer_that_falls_silent_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(row_wire, "_HEARTBEAT_MS", 20)
    monkeypatch.setattr(row_wire, "_SILENT_MS", 500)
    monkeypatch.setattr(submitting, "_CONNECT_S", PATIENCE_S)
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as relay:
        sequencer = context.socket(zmq.ROUTER)
        port = sequencer.bind_to_random_port("tcp://127.0.0.1")
        address = f"127.0.0.1:{relay.getsockname()[1]}"
        submitter = Submitter(context, address, None, threading.Event())
        told = []

        def submit():
            try:
                submitter.submit("here:1", None, b"", b"key")
            except NotReady as error:
                told.append(str(error))

        thread = threading.Thread(target=submit)
        thread.start()
        with relay.accept()[0] as ours, socket.create_connection(("127.0.0.1", port)) as theirs:
            for one in (ours, theirs):
                one.settimeout(0.01)
            while thread.is_alive() and not sequencer.poll(0):
                for source, target in ((ours, theirs), (theirs, ours)):
                    with suppress(TimeoutError):
                        target.sendall(source.recv(4096))
            # From now on nothing is passed on, and no connection ends.
            thread.join(PATIENCE_S)
        sequencer.close(0)
        submitter.close()
    assert told
    assert "the sequencer of changes, ended the connection" in told[0]
