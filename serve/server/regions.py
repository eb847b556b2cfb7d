"""Memory that clients on this host share with the server: Triton's system shared memory.

A client makes a POSIX shared memory object, registers it under a name and then sends offsets in it
instead of tensors. The object stays the client's: it may be rewritten, shortened or unlinked at any
moment. So the server never maps it: touching the end of a shortened object would kill the process.
It reads parts with `pread`, every byte once, in pieces that are still in the processor's cache when
they are checked. The bytes that were checked are the bytes that are used.
"""

import contextlib
import copy
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serve.errors import InvalidInput, NameTaken, QueueFull, UnknownName, Unsupported

#: Folder in which the system keeps the objects of `shm_open`.
_FOLDER = Path("/dev/shm")
#: Longest name of a file, and of a region.
_MAX_NAME = 255
#: Each registered region holds a file open, and most systems allow a process 1,024 by default.
MAX_REGIONS = 256
#: The most of one principal, so that none takes all; callers without a name share the whole.
MAX_REGIONS_OF_PRINCIPAL = 64
#: Bytes read at a time: they fit the second level cache and keep the cost of a call small.
PIECE_BYTES = 256 << 10
_RETRY_NS = 1_000_000_000


class Region:
    """A registered region; its file is open until the last user lets go of it."""

    def __init__(
        self, name: str, key: str, offset_bytes: int, size_bytes: int, owner: str = ""
    ) -> None:
        """Open the object `key`; raises InvalidInput when it is missing, foreign or too small.

        `owner` is the principal that registers it.
        """
        self.name, self.key, self.owner = name, key, owner
        self.offset_bytes, self.size_bytes = offset_bytes, size_bytes
        self.fd = _open(name, key)
        held = os.fstat(self.fd)
        if not stat.S_ISREG(held.st_mode):
            raise InvalidInput(f"shared memory region '{name}': '{key}' is no memory object")
        if held.st_uid != os.geteuid():
            raise InvalidInput(
                f"shared memory region '{name}': '{key}' belongs to another user than the server's"
            )
        if size_bytes < 1 or offset_bytes + size_bytes > held.st_size:
            raise InvalidInput(
                f"shared memory region '{name}': {size_bytes} bytes from {offset_bytes} are not "
                f"within the {held.st_size} bytes of '{key}'"
            )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A tensor's bytes in a region; `len` is their number, as for any bytes."""

    region: Region
    #: Offset from the start of the region.
    start_bytes: int
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order, in pieces; a piece is overwritten by the next.

        Raises InvalidInput when the client has shortened the object.
        """
        buffer = memoryview(bytearray(min(self.size_bytes, PIECE_BYTES)))
        for start in range(0, self.size_bytes, PIECE_BYTES):
            piece = buffer[: self.size_bytes - start]
            taken = 0
            while taken < len(piece):
                offset = self._offset_bytes + start + taken
                count = os.preadv(self.region.fd, [piece[taken:]], offset)
                if count == 0:
                    raise InvalidInput(
                        f"shared memory region '{self.region.name}': '{self.region.key}' has "
                        f"become shorter and ends at byte {offset}"
                    )
                taken += count
            yield piece

    def require_room(self, size_bytes: int) -> None:
        """Raise InvalidInput unless an output of that size fits."""
        if size_bytes > self.size_bytes:
            raise InvalidInput(
                f"shared memory region '{self.region.name}': the output takes {size_bytes} bytes, "
                f"shared_memory_byte_size is {self.size_bytes}"
            )

    def write(self, data: memoryview) -> None:
        """Write `data` at the beginning; raises InvalidInput when it does not fit."""
        self.require_room(len(data))
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.region.fd, data[done:], self._offset_bytes + done)
        except OSError as error:
            raise InvalidInput(
                f"shared memory region '{self.region.name}': '{self.region.key}' cannot be "
                f"written: {error.strerror}"
            ) from error

    @property
    def _offset_bytes(self) -> int:
        """Offset from the start of the region's object."""
        return self.region.offset_bytes + self.start_bytes


class Regions:
    """The regions registered with this server, as one principal sees them. Thread-safe.

    Each principal has its own names. An administrator also sees the regions of others, as
    `principal/name`.
    """

    def __init__(self, *, offered: bool = True) -> None:
        """Refuse every use as unsupported unless `offered`."""
        self.offered = offered
        self._lock = threading.Lock()
        #: By owner and name.
        self._regions: dict[tuple[str, str], Region] = {}
        self._owner = ""
        self._sees_all = False

    def of(self, owner: str, *, sees_all: bool = False) -> "Regions":
        """Return the same regions as `owner` sees them; with `sees_all` it sees those of others."""
        if (owner, sees_all) == (self._owner, self._sees_all):
            return self
        found = copy.copy(self)
        found._owner, found._sees_all = owner, sees_all
        return found

    def register(self, name: str, key: str, offset_bytes: int, size_bytes: int) -> None:
        """Open the object `key` as region `name`.

        Raises NameTaken, InvalidInput, or QueueFull when `MAX_REGIONS` are registered, or this
        principal has `MAX_REGIONS_OF_PRINCIPAL`.
        """
        self._require_offered()
        if not 1 <= len(name) <= _MAX_NAME:
            raise InvalidInput(f"name: {len(name)} characters, 1 to {_MAX_NAME} are taken")
        with self._lock:
            if (self._owner, name) in self._regions:
                raise NameTaken(f"shared memory region '{name}' is registered already")
            if len(self._regions) >= MAX_REGIONS:
                raise QueueFull(
                    f"{MAX_REGIONS} shared memory regions are registered, which is the most taken",
                    _RETRY_NS,
                )
            own = sum(owner == self._owner for owner, _ in self._regions)
            if self._owner and own >= MAX_REGIONS_OF_PRINCIPAL:
                raise QueueFull(
                    f"'{self._owner}' has {own} shared memory regions, which is the most of one",
                    _RETRY_NS,
                )
            self._regions[self._owner, name] = Region(
                name, key, offset_bytes, size_bytes, self._owner
            )

    def unregister(self, name: str) -> None:
        """Forget the region `name`, or all own ones without; requests that use them go on.

        An own one of that name goes before another's.
        """
        self._require_offered()
        with self._lock:
            if self._regions.pop((self._owner, name), None) is not None:
                return
            for region in tuple(self._regions.values()):
                mine = region.owner == self._owner
                if mine if not name else self._shows(region) and self.name_of(region) == name:
                    del self._regions[region.owner, region.name]

    def registered(self, name: str = "") -> tuple[Region, ...]:
        """Return the region `name`, or all when it is empty; raises UnknownName."""
        self._require_offered()
        with self._lock:
            shown = tuple(filter(self._shows, self._regions.values()))
        if not name:
            return shown
        found = tuple(region for region in shown if self.name_of(region) == name)
        return found or (self._find(name),)

    def name_of(self, region: Region) -> str:
        """Return the name by which this principal knows a region."""
        return region.name if region.owner == self._owner else f"{region.owner}/{region.name}"

    def part(self, name: str, offset_bytes: int, size_bytes: int) -> RegionPart:
        """Return a part of the region `name`; raises UnknownName or InvalidInput."""
        self._require_offered()
        with self._lock:
            region = self._find(name)
        if not (offset_bytes >= 0 <= size_bytes and offset_bytes + size_bytes <= region.size_bytes):
            raise InvalidInput(
                f"shared memory region '{name}': {size_bytes} bytes from {offset_bytes} are not "
                f"within its {region.size_bytes} bytes"
            )
        return RegionPart(region, offset_bytes, size_bytes)

    def _shows(self, region: Region) -> bool:
        return self._sees_all or region.owner == self._owner

    def _find(self, name: str) -> Region:
        region = self._regions.get((self._owner, name))
        if region is None:
            raise UnknownName(f"unknown shared memory region '{name}'")
        return region

    def _require_offered(self) -> None:
        if not self.offered:
            raise Unsupported(
                "shared memory is not offered by this server; see server.shared_memory"
            )


def _open(name: str, key: str) -> int:
    """Open the memory object `key` as `shm_open` does, never a file outside its folder."""
    file = key.lstrip("/")
    if not 1 <= len(file) <= _MAX_NAME or "/" in file or "\0" in file or file in (".", ".."):
        raise InvalidInput(
            f"shared memory region '{name}': key {key[:_MAX_NAME]!r} is not the name of a memory "
            "object: a '/', then no other"
        )
    try:
        return os.open(_FOLDER / file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, UnicodeEncodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a file name"
        raise InvalidInput(f"shared memory region '{name}': cannot open '{key}': {why}") from error
