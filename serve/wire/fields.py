"""Fields of serialized protobuf messages, read and cut out without parsing the whole message."""

from collections.abc import Iterator

#: Wire types of protobuf, see https://protobuf.dev/programming-guides/encoding/.
_LENGTH_DELIMITED, _GROUP, _GROUP_END = 2, 3, 4
_MOST_BITS = (1 << 64) - 1


class WireError(ValueError):
    """Bytes that are no valid message of the expected kind; `str(error)` says what is wrong."""


def prefix(number: int, size_bytes: int) -> bytes:
    """Return the tag and length that precede a length-delimited field."""
    encoded = bytearray((number << 3 | _LENGTH_DELIMITED,))
    while size_bytes > 0x7F:
        encoded.append(size_bytes & 0x7F | 0x80)
        size_bytes >>= 7
    encoded.append(size_bytes)
    return bytes(encoded)


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """Return the number at `position` modulo 2^64, as protobuf reads it, and the position after."""
    byte = view[position]
    if byte < 0x80:
        return byte, position + 1
    value = byte & 0x7F
    for shift in range(7, 70, 7):
        position += 1
        byte = view[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MOST_BITS, position + 1
    raise WireError("malformed message: a number longer than 10 bytes")


def fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, start, start of the content and end of each field, in order.

    The start of the content is 0 for fields that are not length-delimited. Fields within a group,
    which none of our messages has, and the group's two ends have number 0. Raises WireError for
    bytes that are no message.
    """
    end, position = len(view), 0
    groups: list[int] = []
    while position < end:
        start, content = position, 0
        try:
            tag, position = _varint(view, position)
            number, kind = tag >> 3, tag & 7
            if not number or tag >> 32 or position - start > 5:
                raise WireError(f"malformed message: no valid tag at byte {start}")
            inside = bool(groups)
            if kind == _LENGTH_DELIMITED:
                size, content = _varint(view, position)
                position = content + size
            elif kind == 0:
                _, position = _varint(view, position)
            elif kind == 1:
                position += 8
            elif kind == 5:
                position += 4
            elif kind == _GROUP:
                groups.append(number)
                inside = True
            elif kind == _GROUP_END and groups and groups.pop() == number:
                pass
            else:
                raise WireError(f"malformed message: wire type {kind} at byte {start}")
        except IndexError:
            position = end + 1
        if position > end:
            break
        yield (0, start, 0, position) if inside else (number, start, content, position)
    if position != end or groups:
        raise WireError(f"malformed message: it ends after {end} bytes within a field")


def split(message: bytes | memoryview, number: int) -> tuple[bytes, list[memoryview]]:
    """Return the message without its fields `number`, and those fields as views."""
    view = memoryview(message)
    rest: list[memoryview] = []
    taken: list[memoryview] = []
    kept = 0
    for field, start, content, end in fields(view):
        if field == number and content:
            taken.append(view[content:end])
            rest.append(view[kept:start])
            kept = end
    rest.append(view[kept:])
    return b"".join(rest), taken
