"""Protobuf messages as JSON values: numbers stay numbers, enumerators are names."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor


def plain(message: Any) -> dict[str, Any]:
    """Return the fields of a message by name; those that hold no message only if they are set."""
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        inner = kind.fields_by_name["value"]
        return {str(key): _value(inner, each) for key, each in value.items()}
    if not isinstance(value, str | bytes | int | float) and not hasattr(value, "DESCRIPTOR"):
        return [_value(field, each) for each in value]
    return _value(field, value)


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return plain(value) if field.message_type is not None else value
