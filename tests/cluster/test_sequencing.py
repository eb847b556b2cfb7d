"""What the sequencer of changes keeps of those that were sent to it."""

import sys
import time
from contextlib import closing

import msgspec
import pytest

zmq = pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from serve.cluster.change_log import ChangeLog  # noqa: E402
from serve.cluster.change_wire import ChangeRecord, ChangeSubmission  # noqa: E402
from serve.cluster.made_changes import MadeChanges  # noqa: E402
from serve.cluster.sequencing import SequencerThread  # noqa: E402
from serve.errors import InvalidInput  # noqa: E402
from serve.graphs.change_bytes import encode_change  # noqa: E402
from serve.graphs.updates import Change  # noqa: E402


class Graphs:
    """One graph, which is changed unless `refused`."""

    refused = False

    def files_of(self, graph):
        return b"files"

    def make(self, graph, change, if_version, before):
        if self.refused:
            raise InvalidInput("it is refused")
        before()


@pytest.mark.parametrize("refused", [False, True])
def test_no_change_is_kept_in_memory_once_it_is_made_or_refused(tmp_path, refused):
    graphs = Graphs()
    graphs.refused = refused
    record = ChangeRecord(b"key", "g", b"files", encode_change(Change()))
    data = msgspec.msgpack.encode(record)
    head = msgspec.msgpack.encode(ChangeSubmission("a:1", None))
    with zmq.Context() as context, closing(ChangeLog(tmp_path / "log", 1 << 20)) as log:
        messages = context.socket(zmq.PAIR)
        thread = SequencerThread(context, messages, ["a:1"], log, graphs, MadeChanges())
        before = sys.getrefcount(data)
        try:
            for _ in range(2):  # it is sent once more where the answer was lost
                thread.received([b"identity", head, data], time.monotonic_ns())
            assert sys.getrefcount(data) == before
            assert thread.counts == {"made": not refused, "refused": refused}
        finally:
            thread.stop()
