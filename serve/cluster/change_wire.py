"""Messages by which servers agree on changes of graphs that are shared out.

They go over the link for rows, see ``row_wire``, with a frame before them that tells them apart.
"""

import msgspec

from serve import errors
from serve.errors import NotReady, ServeError

#: First frame of these messages.
MARK = b"changes"
#: Bytes of changes that one message brings, about.
BATCH_BYTES = 1 << 20
_REFUSALS: dict[str, type[ServeError]] = {
    kind.__name__: kind
    for kind in (errors.InvalidInput, errors.UnknownName, errors.Mismatch, errors.TooBig, NotReady)
}


class ChangeRecord(msgspec.Struct, frozen=True, array_like=True):
    """A change as the log has it."""

    #: Tells it from all others.
    key: bytes
    graph: str
    #: Digest of what servers read of the graph at their start.
    files: bytes
    #: See ``graphs.change_bytes``.
    change: bytes


class ChangeSubmission(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Asks for a change; its record follows."""

    server: str
    #: Version that the graph must have; None for any.
    if_version: int | None


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Asks for the changes after those that were made, of which it has number and digest."""

    server: str
    number: int
    digest: bytes
    waits: bool


class Changes(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answers an ask; the records follow, perhaps none."""

    after: int
    latest: int


class OtherHistory(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answers an ask of who made changes that are not in the log."""

    number: int


class Confirmation(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answers a submission: it was made."""

    key: bytes
    number: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Answers a submission that nothing came of."""

    key: bytes
    #: Name of the error's class.
    kind: str
    told: str

    @classmethod
    def of(cls, key: bytes, error: ServeError) -> "Refusal":
        """Return the answer that brings the error."""
        return cls(key, type(error).__name__, str(error))

    def error(self) -> ServeError:
        """Return the error that it brings."""
        return _REFUSALS.get(self.kind, NotReady)(self.told)


ToSequencer = ChangeSubmission | Ask
FromSequencer = Changes | OtherHistory | Confirmation | Refusal
