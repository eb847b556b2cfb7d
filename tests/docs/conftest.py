"""Fixtures of the pages' tests: the demo's server, and a database with a past."""

from tests.e2e.conftest import server
from tests.obs.conftest import database

__all__ = ["database", "server"]
