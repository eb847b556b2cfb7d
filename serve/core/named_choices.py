"""Things chosen by name in the configuration."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

from serve.errors import ConfigError


class Named(Protocol):
    """Anything that knows the name it is registered under."""

    name: str


T = TypeVar("T", bound=Named)
ClassT = TypeVar("ClassT", bound=Named)


class NamedChoices(Mapping[str, T]):
    """Name to instance; a duplicate name is a bug, an unknown one lists the choices."""

    def __init__(self, kind: str) -> None:
        #: What is registered here, for messages: `policy`, `discipline`.
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, make: Callable[[], T]) -> Callable[[], T]:
        """Register one instance of the class and return the class; a class decorator."""
        entry = make()
        if entry.name in self._entries:
            raise ValueError(f"two of {self.kind} are called '{entry.name}'")
        self._entries[entry.name] = entry
        return make

    def get_named(self, name: str) -> T:
        """Return the one called `name`; raise ConfigError that lists the choices."""
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise ConfigError(f"unknown {self.kind} '{name}'; known: {known}") from None

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
