"""Request parameters: which ones mean something here, their types and their ranges."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from serve.errors import DeadlineExceeded, InvalidInput, UnknownName, Unsupported
from serve.server.regions import RegionPart, Regions
from serve.wire.messages import REGION, REGION_OFFSET, REGION_SIZE, ParameterValue, Unsigned

#: Parameters as they came: by name, None where nothing is held.
Parameters = Mapping[str, ParameterValue | None]
#: How the protocol calls the members that values of these types came in.
_MEMBERS = {
    bool: "bool_param",
    int: "int64_param",
    str: "string_param",
    float: "double_param",
    Unsigned: "uint64_param",
    type(None): "no value",
}

#: Longest text taken as a parameter or an id.
MAX_TEXT = 256
#: Durations are nanoseconds in 64 bits inside.
_MAX_US = (2**63 - 1) // 1000
#: Most hops that are sampled for one request.
MAX_HOPS = 16
_MAX_PRIORITY = 2**31 - 1
#: A call without a deadline reports some 292 years; nobody waits for one.
_NO_DEADLINE_S = 1e9


class Options(NamedTuple):
    """The request parameters that mean something here."""

    qos_target_us: int | None
    timeout_us: int | None
    priority: int
    tenant: str
    seed: int | None
    graph: str | None
    fanouts: tuple[int, ...] | Literal["all"] | None


def decode_options(parameters: Parameters) -> Options:
    """Known parameters, checked; others are tolerated, since clients add their own."""
    if not parameters:
        return Options(None, None, 0, "", None, None, None)
    timeout_us = _integer(parameters, "timeout", 0, _MAX_US)
    return Options(
        qos_target_us=_integer(parameters, "qos_target_us", 1, _MAX_US),
        timeout_us=timeout_us or None,  # 0 is how clients say "none"
        priority=_integer(parameters, "priority", 0, _MAX_PRIORITY, (Unsigned,)) or 0,
        tenant=_text(parameters, "tenant") or "",
        seed=_integer(parameters, "seed", -(2**63), 2**63 - 1),
        graph=_text(parameters, "graph"),
        fanouts=parse_fanouts(_text(parameters, "fanouts")),
    )


def parse_fanouts(text: str | None) -> tuple[int, ...] | Literal["all"] | None:
    """Numbers in `text`, separated by commas, or the word `all`; raises InvalidInput."""
    if text is None or text == "all":
        return text  # type: ignore[return-value]
    words = text.split(",")
    try:
        found = tuple(int(word) for word in words)
    except ValueError:
        found = ()
    if not 0 < len(found) <= MAX_HOPS or not all(
        fanout == -1 or 1 <= fanout < 2**31 for fanout in found
    ):
        raise InvalidInput(
            f"parameter 'fanouts': {text!r} is neither 'all' nor 1 to {MAX_HOPS} numbers "
            "separated by commas, each positive or -1 (all)"
        )
    return found


def _integer(
    parameters: Parameters,
    name: str,
    low: int,
    high: int,
    also: tuple[type, ...] = (),
) -> int | None:
    """The integer parameter `name` in [low, high], or None if it is not given."""
    if name not in parameters:
        return None
    value: int = _checked(parameters[name], name, (int, *also))
    if not low <= value <= high:
        raise InvalidInput(f"parameter '{name}': {value} is not in [{low}, {high}]")
    return value


def _text(parameters: Parameters, name: str) -> str | None:
    """The string parameter `name`, or None if it is not given."""
    if name not in parameters:
        return None
    value: str = _checked(parameters[name], name, (str,))
    if len(value) > MAX_TEXT:
        raise InvalidInput(
            f"parameter '{name}': {len(value)} characters, at most {MAX_TEXT} are taken"
        )
    return value


def _checked(value: ParameterValue | None, name: str, kinds: tuple[type, ...]) -> Any:
    """The value of the parameter, which must have come as one of `kinds`."""
    if type(value) not in kinds:
        wanted = " or ".join(_MEMBERS[kind] for kind in kinds)
        raise InvalidInput(
            f"parameter '{name}': {_MEMBERS[type(value)]} is given, expected {wanted}"
        )
    return value


def region_part(parameters: Parameters, of: str, regions: Regions) -> RegionPart:
    """The part of a shared memory region that the parameters of a tensor name.

    Raises InvalidInput, UnknownName or Unsupported, naming the tensor as `of`.
    """
    try:
        size_bytes = _integer(parameters, REGION_SIZE, 0, 2**63 - 1)
        if size_bytes is None:
            raise InvalidInput(f"parameter '{REGION_SIZE}' is missing")
        offset_bytes = _integer(parameters, REGION_OFFSET, 0, 2**63 - 1) or 0
        return regions.part(_text(parameters, REGION) or "", offset_bytes, size_bytes)
    except (InvalidInput, UnknownName, Unsupported) as error:
        raise type(error)(f"{of}: {error}") from error


def effective_timeout_ns(timeout_us: int | None, remaining_s: float) -> int | None:
    """The smaller of the parameter and the gRPC deadline; None: neither is set."""
    limits = []
    if timeout_us is not None:
        limits.append(timeout_us * 1000)
    if remaining_s < _NO_DEADLINE_S:
        limits.append(int(remaining_s * 1e9))
    if not limits:
        return None
    if min(limits) <= 0:
        raise DeadlineExceeded("the gRPC deadline had passed when the request arrived")
    return min(limits)
