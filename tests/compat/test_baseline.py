"""The protocol stays compatible with what was accepted before."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from tests.compat.baseline import breaking_changes, current_shape, shape_of, stored_shape

FIELD = FieldDescriptorProto


def test_the_protocol_is_compatible_with_its_baseline() -> None:
    broken = breaking_changes(stored_shape(), current_shape())
    assert not broken, "older peers would break:\n" + "\n".join(broken)


def test_the_baseline_knows_everything_that_is_there() -> None:
    """What is not in the baseline could be removed again unnoticed."""
    assert stored_shape() == current_shape(), (
        "the protocol has grown: run `make proto-baseline` and commit it"
    )


@pytest.fixture
def protocol() -> FileDescriptorProto:
    """message Ask { bytes hashes = 1; oneof kind { uint32 first = 2; string name = 3; } reserved 9; enum Mode }"""
    file = FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    ask = file.message_type.add(name="Ask")
    ask.field.add(name="hashes", number=1, type=FIELD.TYPE_BYTES, label=FIELD.LABEL_OPTIONAL)
    ask.oneof_decl.add(name="kind")
    ask.field.add(name="first", number=2, type=FIELD.TYPE_UINT32, label=FIELD.LABEL_OPTIONAL, oneof_index=0)
    ask.field.add(name="name", number=3, type=FIELD.TYPE_STRING, label=FIELD.LABEL_OPTIONAL, oneof_index=0)
    ask.reserved_range.add(start=9, end=10)
    mode = ask.enum_type.add(name="Mode")
    mode.value.add(name="A", number=0)
    mode.value.add(name="B", number=1)
    ask.nested_type.add(name="Part").field.add(
        name="size", number=1, type=FIELD.TYPE_UINT64, label=FIELD.LABEL_OPTIONAL
    )
    service = file.service.add(name="Kv")
    service.method.add(name="Get", input_type=".t.Ask", output_type=".t.Ask", server_streaming=True)
    return file


def remove(ask: DescriptorProto, *reserve: str | int) -> None:
    del ask.field[0]
    for item in reserve:
        if isinstance(item, int):
            ask.reserved_range.add(start=item, end=item + 1)
        else:
            ask.reserved_name.append(item)


def test_the_shape_is_readable(protocol: FileDescriptorProto) -> None:
    assert shape_of(protocol) == {
        "messages": {
            "Ask": {
                "fields": {
                    "1": "bytes hashes",
                    "2": "oneof kind: uint32 first",
                    "3": "oneof kind: string name",
                },
                "reserved": ["9"],
            },
            "Ask.Part": {"fields": {"1": "uint64 size"}, "reserved": []},
        },
        "enums": {"Ask.Mode": {"fields": {"0": "A", "1": "B"}, "reserved": []}},
        "services": {"Kv": {"Get": "t.Ask -> stream t.Ask"}},
    }


CHANGES: list[tuple[Callable[[FileDescriptorProto], object], str]] = [
    (
        lambda f: remove(f.message_type[0]),
        "message Ask: field 1 (bytes hashes) was removed; reserve 1 and hashes",
    ),
    (
        lambda f: remove(f.message_type[0], 1),
        "message Ask: field 1 (bytes hashes) was removed; reserve hashes",
    ),
    (
        lambda f: setattr(f.message_type[0].field[0], "type", FIELD.TYPE_STRING),
        "was (bytes hashes) and is (string hashes)",
    ),
    (lambda f: setattr(f.message_type[0].field[0], "name", "keys"), "was (bytes hashes) and is (bytes keys)"),
    (
        lambda f: setattr(f.message_type[0].field[0], "label", FIELD.LABEL_REPEATED),
        "and is (repeated bytes hashes)",
    ),
    (lambda f: setattr(f.message_type[0].field[0], "number", 7), "field 1 (bytes hashes) was removed"),
    (
        lambda f: f.message_type[0].field[1].ClearField("oneof_index"),
        "was (oneof kind: uint32 first) and is (uint32 first)",
    ),
    (
        lambda f: f.message_type[0].ClearField("reserved_range"),
        "message Ask: 9 was reserved and no longer is",
    ),
    (lambda f: f.message_type[0].ClearField("nested_type"), "message Ask.Part was removed"),
    (
        lambda f: setattr(f.message_type[0].enum_type[0].value[1], "name", "C"),
        "enum Ask.Mode: value 1 was (B) and is (C)",
    ),
    (lambda f: f.service[0].ClearField("method"), "service Kv: Get was removed"),
    (lambda f: f.ClearField("service"), "service Kv: Get was removed"),
    (
        lambda f: f.service[0].method[0].ClearField("server_streaming"),
        "was (t.Ask -> stream t.Ask) and is (t.Ask -> t.Ask)",
    ),
]


@pytest.mark.parametrize("change,line", CHANGES)
def test_a_breaking_change_is_found(
    protocol: FileDescriptorProto, change: Callable[[FileDescriptorProto], object], line: str
) -> None:
    changed = copy.deepcopy(protocol)
    change(changed)
    broken = breaking_changes(shape_of(protocol), shape_of(changed))
    assert len(broken) == 1
    assert line in broken[0]


def test_growth_and_orderly_retirement_are_compatible(protocol: FileDescriptorProto) -> None:
    changed = copy.deepcopy(protocol)
    ask = changed.message_type[0]
    remove(ask, 1, "hashes")
    ask.field.add(name="more", number=4, type=FIELD.TYPE_BYTES, label=FIELD.LABEL_OPTIONAL)
    ask.enum_type[0].value.add(name="C", number=2)
    changed.message_type.add(name="Other")
    changed.service[0].method.add(name="Put", input_type=".t.Ask", output_type=".t.Ask")
    assert breaking_changes(shape_of(protocol), shape_of(changed)) == []
