from tests.rpc.conftest import engine, front, reports, server, target

__all__ = ["engine", "front", "reports", "server", "target"]
