"""Disciplines, which run planned groups: one file each, registered by name."""

from serve.core.disciplines import barrier, preemptive, rolling
from serve.core.disciplines.base import DISCIPLINES, Discipline, register_discipline

__all__ = [
    "DISCIPLINES",
    "Discipline",
    "barrier",
    "get_discipline",
    "preemptive",
    "register_discipline",
    "rolling",
]


def get_discipline(name: str) -> Discipline:
    """Return the discipline called `name`; raise ConfigError that lists the choices."""
    return DISCIPLINES.get_named(name)
