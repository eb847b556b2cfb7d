"""`[[model.input]]` and `[[model.output]]` of a config.toml, and what is wrong with them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from serve.errors import ConfigError
from serve.interface import DTYPES, Dim, InputSlot, Interface, TensorSlot, is_float
from serve.toml_tables import Section
from serve.typed_names import name_parts

#: Most inputs, and most outputs: what a message may hold.
MOST_TENSORS = 16
#: Most axes of a tensor.
_MOST_AXES = 8
#: Name of requests by node id, which no model may take.
_RESERVED = ("node_ids",)
#: A name, with parts after dots for things of several types: `x.author`.
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class OutputSection(Section, frozen=True):
    """`[[model.output]]`: one tensor that forward returns."""

    name: str
    dtype: str
    #: Sizes, and symbols for those that a request determines.
    shape: tuple[int | str, ...]


class InputSection(Section, frozen=True):
    """`[[model.input]]`: one tensor that forward takes."""

    name: str
    dtype: str
    #: Sizes, and symbols for those that a request determines.
    shape: tuple[int | str, ...]
    #: Symbol of the things that its values point to; or one for each row.
    index: str | tuple[str, ...] | None = None
    #: True when a request may leave it out; forward then gets None.
    optional: bool = False
    #: Value of all entries when a request leaves it out.
    default: float | None = None
    #: Values lie in [low, high); a list gives each column its own.
    low: float | tuple[int, ...] | None = None
    high: float | tuple[int, ...] | None = None

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Range of each column, as far as both ends are told; empty when all have one."""
        if not (isinstance(self.low, tuple) or isinstance(self.high, tuple)):
            return ()
        many = max(len(end) for end in (self.low, self.high) if isinstance(end, tuple))
        lows, highs = (
            end if isinstance(end, tuple) else (int(end or 0),) * many
            for end in (self.low, self.high)
        )
        return tuple(zip(lows, highs, strict=False))


def interface_of(
    inputs: Sequence[InputSection], outputs: Sequence[OutputSection], path: str
) -> Interface:
    """Return the declared inputs and outputs; raises ConfigError naming `path` and every fault."""
    slots = tuple(map(_input_slot, inputs))
    told = tuple(TensorSlot(one.name, one.dtype, one.shape) for one in outputs)
    faults = [
        *_faults(slots, told),
        *(f"model.input '{one.name}': {fault}" for one in inputs for fault in _column_faults(one)),
    ]
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    return Interface(slots, told)


def declaration_text(inputs: Sequence[InputSlot], outputs: Sequence[TensorSlot]) -> str:
    """Return the sections of these inputs and outputs as TOML."""
    tables: list[str] = []
    for slot in inputs:
        keys: dict[str, Any] = {"index": slot.index[0] if len(slot.index) == 1 else slot.index}
        if slot.default is None:
            keys["optional"] = slot.optional
        lows, highs = zip(*slot.columns, strict=True) if slot.columns else (slot.low, slot.high)
        low, high = (_whole(end) for end in (lows, highs))
        keys |= {"low": low, "high": high, "default": _whole(slot.default)}
        tables.append(_table("input", slot, keys))
    tables += [_table("output", slot, {}) for slot in outputs]
    return "\n".join(tables)


def _table(kind: str, slot: TensorSlot, keys: Mapping[str, Any]) -> str:
    every = {"name": slot.name, "dtype": slot.datatype, "shape": slot.shape, **keys}
    lines = [f"[[model.{kind}]]"]
    for key, value in every.items():
        if not (value is None or value is False or value == ()):
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _whole(value: Any) -> Any:
    """Return a number as a whole one where it is; anything else as it is."""
    return int(value) if isinstance(value, float) and value == int(value) else value


def _input_slot(section: InputSection) -> InputSlot:
    index = (section.index,) if isinstance(section.index, str) else section.index or ()
    given: dict[str, Any] = msgspec.structs.asdict(section)
    optional = section.optional or section.default is not None
    return InputSlot(
        **{
            **{key: given[key] for key in ("name", "shape", "default")},
            "low": _end(section.low, min),
            "high": _end(section.high, max),
            "columns": section.columns,
            "datatype": section.dtype,
            "index": index,
            "optional": optional,
        }
    )


def _end(
    told: float | tuple[int, ...] | None, of_all: Callable[[tuple[int, ...]], int]
) -> float | None:
    """Return an end of the range that holds the values of all columns."""
    if isinstance(told, tuple):
        return of_all(told) if told else None
    return told


def _column_faults(section: InputSection) -> Iterator[str]:
    """Yield what is wrong with ranges that are lists."""
    last = section.shape[-1] if len(section.shape) > 1 else None
    width = last if isinstance(last, int) else None
    for key, told in (("low", section.low), ("high", section.high)):
        if not isinstance(told, tuple):
            continue
        if section.dtype not in DTYPES or is_float(section.dtype) or section.dtype == "BOOL":
            yield f"{key}: only integers have a range for each column, not {section.dtype}"
        elif len(told) != width:
            yield (
                f"{key}: {len(told)} numbers for {width or 'no'} columns; give one, or one for each"
            )
    for column, (low, high) in enumerate(section.columns):
        if low >= high:
            yield f"column {column}: low {low} is not below high {high}"


def _faults(inputs: Sequence[InputSlot], outputs: Sequence[TensorSlot]) -> Iterator[str]:
    """Yield what is wrong, each with its key."""
    for kind, slots in (("input", inputs), ("output", outputs)):
        if not slots:
            yield f"model.{kind}: none is declared; declare all inputs and outputs, or neither"
        if len(slots) > MOST_TENSORS:
            yield f"model.{kind}: {len(slots)} are declared, at most {MOST_TENSORS} are taken"
        seen: set[str] = set()
        for slot in slots:
            for fault in _slot_faults(slot):
                yield f"model.{kind} '{slot.name}': {fault}"
            if slot.name in seen:
                yield f"model.{kind} '{slot.name}': the name is given twice"
            seen.add(slot.name)
    for slot in inputs:
        for fault in _input_faults(slot):
            yield f"model.input '{slot.name}': {fault}"
    yield from _symbol_faults(inputs, outputs)


def _slot_faults(slot: TensorSlot) -> Iterator[str]:
    if not _NAME.fullmatch(slot.name):
        yield "a name is letters, digits and underscores, with dots between its parts"
    if slot.datatype not in DTYPES:
        yield f"dtype: unknown '{slot.datatype}'; known: {', '.join(DTYPES)}"
    if len(slot.shape) > _MOST_AXES:
        yield f"shape: {len(slot.shape)} axes, at most {_MOST_AXES} are taken"
    if len(slot.symbols) > 1:
        yield f"shape: {_listed(slot.shape)} has {len(slot.symbols)} symbols; one is taken"
    for dim in slot.shape:
        if isinstance(dim, str) and not _NAME.fullmatch(dim):
            yield f"shape: {dim!r} is no symbol; a symbol is a name like N or N.author"
        if isinstance(dim, int) and dim < 1:
            yield f"shape: {dim} is not at least 1"


def _input_faults(slot: InputSlot) -> Iterator[str]:
    integer = slot.datatype in DTYPES and not is_float(slot.datatype) and slot.datatype != "BOOL"
    if name_parts(slot.name)[0] in _RESERVED:
        yield "the name belongs to requests by node id"
    if slot.index and slot.datatype not in ("INT64", "INT32"):
        yield f"index: only INT64 and INT32 can point to things, not {slot.datatype}"
    rows = slot.shape[0] if slot.shape else None
    if len(slot.index) > 1 and rows != len(slot.index):
        yield f"index: {len(slot.index)} symbols for {rows} rows; give one for all, or one for each"
    if slot.index and (slot.low is not None or slot.high is not None):
        yield "low and high: an index has its range from what it points to"
    if integer and not slot.index and slot.high is None:
        yield (
            "its values are unknown: give index, the symbol of what they point to, or low and high"
        )
    low, high = slot.bounds
    if not low < high:
        yield f"low {low:g} is not below high {high:g}"
    default = slot.default
    for low, high in slot.columns or (slot.bounds,):
        if default is not None and not slot.index and integer and not low <= default < high:
            yield f"default {default:g} is outside [{low:g}, {high:g})"


def _symbol_faults(inputs: Sequence[InputSlot], outputs: Sequence[TensorSlot]) -> Iterator[str]:
    bound = {symbol for slot in inputs if not slot.optional for symbol in slot.symbols}
    loose = {symbol for slot in inputs for symbol in slot.symbols} - bound
    for symbol in sorted(loose):
        yield f"model.input: symbol '{symbol}' is only in inputs that a request may leave out"
    graphs = {s for slot in inputs for s in slot.index if len(slot.index) == 1} - bound - loose
    if not bound:
        yield "model.input: no shape has a symbol; the size of a request would be unknown"
    for slot in inputs:
        for symbol in slot.index:
            if symbol not in bound | loose | graphs:
                yield f"model.input '{slot.name}': index: no input's shape binds '{symbol}'"
            if symbol in graphs and (len(slot.shape) != 1 or not slot.symbols):
                yield (
                    f"model.input '{slot.name}': index: no input's shape binds '{symbol}', and only"
                    " a vector can number graphs"
                )
    for output in outputs:
        for symbol in output.symbols:
            if symbol not in bound | graphs:
                yield f"model.output '{output.name}': no input binds the symbol '{symbol}'"


def _listed(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
