"""Request parameters: the ones this server understands, with their types and ranges."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from serve.access.principal import ANYBODY, Principal
from serve.core.rules.packing import DEFAULT_PRIORITY
from serve.errors import DeadlineExceeded, InvalidInput
from serve.server.api import Fanouts
from serve.wire.messages import ParameterValue, Unsigned

#: Parameters by name, as they arrived; None for one that holds no value.
Parameters = Mapping[str, ParameterValue | None]
#: What a Python type is decoded from: in JSON, and the member of the protocol's `InferParameter`.
_MEMBERS = {
    bool: "true or false (bool_param)",
    int: "a whole number (int64_param)",
    str: "a text (string_param)",
    float: "a number with decimals (double_param)",
    Unsigned: "a whole number (uint64_param)",
    type(None): "no value",
}

#: Longest string parameter or request id, in characters.
MAX_TEXT = 256
#: Longest fan-outs: of each type of edges that a model may take.
_MAX_FANOUTS = 4096
#: Most hops that are sampled for one request.
MAX_HOPS = 16
#: Durations are kept as nanoseconds in 64 bits.
_MAX_US = (2**63 - 1) // 1000
_MAX_PRIORITY = 2**31 - 1
#: The parameter that says where nodes of a graph that is shared out are answered: all by the server
#: that the request is at, or each where it lives.
SPLIT = "split"
_BY_HOME = {"off": False, "home": True}
#: gRPC reports some 292 years for a call without a deadline.
_NO_DEADLINE_S = 1e9


class RequestParameters(NamedTuple):
    """The parameters of one inference request, checked; see ``InferCall`` for their meaning."""

    qos_target_ns: int | None = None
    #: The smaller of the parameter `timeout` and the gRPC deadline; None without either.
    timeout_ns: int | None = None
    priority: int = 0
    tenant: str = ""
    seed: int | None = None
    graph: str | None = None
    fanouts: Fanouts | None = None
    by_home: bool = False


def decode_parameters(
    parameters: Parameters, remaining_s: float, caller: Principal = ANYBODY
) -> RequestParameters:
    """Check the known parameters and ignore all others, since clients add their own.

    Args:
        parameters: As decoded from the message.
        remaining_s: Seconds until the gRPC deadline.
        caller: Whom the request comes from. Its tenant, if it has one, is the request's.

    Raises:
        InvalidInput: A value has the wrong type or is out of range.
        NotPermitted: The caller's tenant may not ask for this.
        DeadlineExceeded: The deadline passed before the request arrived.
    """
    if not parameters and caller.tenant is None:
        return RequestParameters(timeout_ns=_timeout_ns(None, remaining_s))
    qos_target_us = integer(parameters, "qos_target_us", 1, _MAX_US)
    timeout_us = integer(parameters, "timeout", 0, _MAX_US)
    priority = integer(parameters, "priority", 0, _MAX_PRIORITY, (Unsigned,)) or 0
    tenant = text(parameters, "tenant") or ""
    if caller.tenant is not None:
        caller.tenant.require(tenant, priority, qos_target_us)
        tenant = caller.tenant.name
        highest = caller.tenant.highest_priority or 0
        if not priority and highest > DEFAULT_PRIORITY:
            priority = highest
    return RequestParameters(
        qos_target_ns=None if qos_target_us is None else qos_target_us * 1000,
        timeout_ns=_timeout_ns(timeout_us, remaining_s),
        priority=priority,
        tenant=tenant,
        seed=integer(parameters, "seed", -(2**63), 2**63 - 1),
        graph=text(parameters, "graph"),
        fanouts=parse_fanouts(text(parameters, "fanouts", _MAX_FANOUTS)),
        by_home=_by_home(text(parameters, SPLIT)),
    )


def _by_home(given: str | None) -> bool:
    """Return True where nodes may be answered where they live; raises InvalidInput."""
    if given is None:
        return False
    if given not in _BY_HOME:
        raise InvalidInput(f"parameter '{SPLIT}': {given!r} is not one of {', '.join(_BY_HOME)}")
    return _BY_HOME[given]


def parse_fanouts(given: str | None) -> Fanouts | None:
    """Parse comma-separated fan-outs or the word `all`; raises InvalidInput.

    For several types of edges, each has its own after its name, such as
    `author__writes__paper=10,5;*=3,3`.
    """
    if given is None or given == "all":
        return given  # type: ignore[return-value]
    if "=" not in given:
        return _numbers(given, given, 1)
    found: dict[str, tuple[int, ...]] = {}
    for part in given.split(";"):
        name, _, numbers = part.strip().partition("=")
        if name in found:
            raise InvalidInput(f"parameter 'fanouts': '{name}' is given twice")
        found[name] = _numbers(numbers, part.strip(), 0)
    return found


def _numbers(words: str, given: str, least: int) -> tuple[int, ...]:
    """Return comma-separated fan-outs; `given` is what is told when they are none."""
    try:
        found = tuple(int(word) for word in words.split(","))
    except ValueError:
        found = ()
    if not 0 < len(found) <= MAX_HOPS or not all(
        fanout == -1 or least <= fanout < 2**31 for fanout in found
    ):
        raise InvalidInput(
            f"parameter 'fanouts': {given!r} is neither 'all' nor 1 to {MAX_HOPS} numbers "
            "separated by commas, each positive or -1 (all)"
        )
    return found


def integer(
    parameters: Parameters,
    name: str,
    low: int,
    high: int,
    also: tuple[type, ...] = (),
) -> int | None:
    """Return the integer parameter `name`, which must lie in [low, high]; None if absent."""
    if name not in parameters:
        return None
    value: int = _typed(parameters[name], name, (int, *also))
    if not low <= value <= high:
        raise InvalidInput(f"parameter '{name}': {value} is not in [{low}, {high}]")
    return value


def text(parameters: Parameters, name: str, most: int = MAX_TEXT) -> str | None:
    """Return the string parameter `name`, of at most `most` characters; None if absent."""
    if name not in parameters:
        return None
    value: str = _typed(parameters[name], name, (str,))
    if len(value) > most:
        raise InvalidInput(f"parameter '{name}': {len(value)} characters, at most {most} are taken")
    return value


def _typed(value: ParameterValue | None, name: str, kinds: tuple[type, ...]) -> Any:
    """Return `value`; raises InvalidInput unless its type is one of `kinds`."""
    if type(value) not in kinds:
        wanted = " or ".join(_MEMBERS[kind] for kind in kinds)
        raise InvalidInput(
            f"parameter '{name}': {_MEMBERS[type(value)]} is given, expected {wanted}"
        )
    return value


def _timeout_ns(timeout_us: int | None, remaining_s: float) -> int | None:
    """Return the smaller of the parameter and the gRPC deadline; None when neither is set."""
    limits = []
    if timeout_us:  # clients send 0 for "none"
        limits.append(timeout_us * 1000)
    if remaining_s < _NO_DEADLINE_S:
        limits.append(int(remaining_s * 1e9))
    if not limits:
        return None
    if min(limits) <= 0:
        raise DeadlineExceeded("the gRPC deadline had passed when the request arrived")
    return min(limits)
