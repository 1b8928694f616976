"""The shape of the protocol as reviewable text, and what of a change breaks peers that speak the older one.

    python -m tests.compat.baseline        accept kvstore.proto as it is now (`make proto-baseline`)

The shape is {"messages": {name: {"fields": {number: text}, "reserved": [...]}}, "enums": ..., "services": ...}.
A field's text is everything that the wire or a peer's code depends on: label, type, name and the oneof that it is in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)

BASELINE = Path(__file__).resolve().parents[2] / "proto/kvstore/v1/baseline.json"


class Numbered(TypedDict):
    """A message or an enum: number → what has it, and the numbers and names that nothing may have again."""

    fields: dict[str, str]
    reserved: list[str]


class Shape(TypedDict):
    """What peers depend on."""

    messages: dict[str, Numbered]
    enums: dict[str, Numbered]
    services: dict[str, dict[str, str]]


def shape_of(file: FileDescriptorProto) -> Shape:
    messages = dict(_messages(file.message_type, ""))
    enums = {enum.name: _enum(enum) for enum in file.enum_type} | {
        f"{name}.{enum.name}": _enum(enum) for name, message in messages.items() for enum in message.enum_type
    }
    return {
        "messages": {name: _message(message) for name, message in sorted(messages.items())},
        "enums": dict(sorted(enums.items())),
        "services": {
            service.name: {method.name: _method(method) for method in service.method}
            for service in file.service
        },
    }


def breaking_changes(old: Shape, new: Shape) -> list[str]:
    """One line for each change from `old` to `new` that a peer of the older shape would stumble over."""
    return [
        *_breaking_numbers("message", "field", old["messages"], new["messages"]),
        *_breaking_numbers("enum", "value", old["enums"], new["enums"]),
        *_breaking_services(old["services"], new["services"]),
    ]


def _breaking_numbers(
    kind: str, item: str, old: Mapping[str, Numbered], new: Mapping[str, Numbered]
) -> Iterator[str]:
    for name, before in old.items():
        after = new.get(name)
        if after is None:
            yield f"{kind} {name} was removed"
            continue
        for number, text in before["fields"].items():
            now = after["fields"].get(number)
            if now is None:
                bare = text.split()[-1]
                missing = [what for what in (number, bare) if what not in after["reserved"]]
                if missing:
                    yield f"{kind} {name}: {item} {number} ({text}) was removed; reserve {' and '.join(missing)}"
            elif now != text:
                yield f"{kind} {name}: {item} {number} was ({text}) and is ({now}); reserve it and take a new one"
        for retired in before["reserved"]:
            if retired not in after["reserved"]:
                yield f"{kind} {name}: {retired} was reserved and no longer is"


def _breaking_services(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    for service, methods in old.items():
        for method, text in methods.items():
            now = new.get(service, {}).get(method)
            if now is None:
                yield f"service {service}: {method} was removed"
            elif now != text:
                yield f"service {service}: {method} was ({text}) and is ({now})"


def _messages(messages: Iterable[DescriptorProto], prefix: str) -> Iterator[tuple[str, DescriptorProto]]:
    for message in messages:
        yield prefix + message.name, message
        yield from _messages(message.nested_type, f"{prefix}{message.name}.")


def _message(message: DescriptorProto) -> Numbered:
    fields = sorted(message.field, key=lambda field: field.number)
    # The end of a message's reserved range is exclusive, that of an enum's inclusive.
    ranges = [str(number) for span in message.reserved_range for number in range(span.start, span.end)]
    return {
        "fields": {str(field.number): _field(field, message) for field in fields},
        "reserved": [*ranges, *message.reserved_name],
    }


def _enum(enum: EnumDescriptorProto) -> Numbered:
    ranges = [str(number) for span in enum.reserved_range for number in range(span.start, span.end + 1)]
    return {
        "fields": {str(value.number): value.name for value in enum.value},
        "reserved": [*ranges, *enum.reserved_name],
    }


def _field(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    words = []
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        words.append("repeated")
    if field.proto3_optional:
        words.append("optional")
    elif field.HasField("oneof_index"):
        words.append(f"oneof {message.oneof_decl[field.oneof_index].name}:")
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    words += [field.type_name.lstrip(".") or kind, field.name]
    return " ".join(words)


def _method(method: MethodDescriptorProto) -> str:
    asks = "stream " * method.client_streaming + method.input_type.lstrip(".")
    answers = "stream " * method.server_streaming + method.output_type.lstrip(".")
    return f"{asks} -> {answers}"


def current_shape() -> Shape:
    from kvstore.wire.v1 import kvstore_pb2

    file = FileDescriptorProto()
    kvstore_pb2.DESCRIPTOR.CopyToProto(file)
    return shape_of(file)


def stored_shape() -> Shape:
    shape: Shape = json.loads(BASELINE.read_text())
    return shape


def main() -> None:
    shape = current_shape()
    if BASELINE.exists():
        for line in breaking_changes(stored_shape(), shape):
            print(f"breaks older peers: {line}")
    BASELINE.write_text(json.dumps(shape, indent=2) + "\n")
    print(f"wrote {BASELINE.name}: {len(shape['messages'])} messages")


if __name__ == "__main__":
    main()
