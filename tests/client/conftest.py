from tests.rpc.conftest import engine, reports, server, target

__all__ = ["engine", "reports", "server", "target"]
