"""The file that names the servers of shared-out graphs, as a server that starts reads it."""

from contextlib import closing

from serve.cluster.shared_rows import SharedRows
from serve.cluster.stores_file import write_stores
from serve.commands.serve import _watched_servers


def test_servers_that_come_while_one_starts_are_known_to_it(tmp_path):
    file, log = tmp_path / "stores", tmp_path / "changes.log"
    write_stores(file, [("127.0.0.1:1", 0)])
    with closing(SharedRows(0, "127.0.0.1:0", file, None, 80)) as rows:
        write_stores(file, [("127.0.0.1:1", 0), ("127.0.0.1:2", 0)])
        _watched_servers(None, rows)
        rows.order_changes("127.0.0.1:2", log, 1 << 20)  # which is refused to who is not named
