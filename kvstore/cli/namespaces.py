"""List the namespaces that the service holds blocks of: whose they are, and how many lie where."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.cli.admin import call_admin
from kvstore.errors import InvalidArgument, NotFound
from kvstore.units import format_count
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["ask", "choose", "namespaces"]

_SHOWN_DIGITS = 12
_HIDDEN = ("salt",)
"""Parts that are as good as passwords: who knows them can ask what is cached under them."""


def namespaces(
    *,
    socket: Annotated[str | None, typer.Option(help="Socket of the service.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the namespaces of the service."""
    found = ask(socket)
    if as_json:
        print(json.dumps({"namespaces": [_as_dict(info) for info in found]}))
        return
    Console().print(_render(found))


def _render(found: Sequence[pb.NamespaceInfo]) -> Table:
    """A table that fits 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("namespace", "model", "what else"):
        table.add_column(header, overflow="fold")
    for header in ("blocks", "HBM", "DRAM", "NVMe"):
        table.add_column(header, justify="right", no_wrap=True)
    for info in sorted(found, key=lambda info: -info.blocks):
        parts = _parts(info)
        words = [f"{tag} {value}" for tag, value in parts.items() if tag in _SHOWN_PARTS]
        words += ["key of another machine"] if info.adopted else []
        table.add_row(
            info.digest.hex()[:_SHOWN_DIGITS],
            parts.get("model", "not known"),
            ", ".join(words),
            *(
                format_count(count)
                for count in (info.blocks, info.hbm_blocks, info.dram_blocks, info.nvme_blocks)
            ),
        )
    return table


_SHOWN_PARTS = (
    "dtype",
    "adapter",
    "block_tokens",
    "codec",
    "epoch",
    "quantization",
    "salt",
    "sharding",
    "tenant",
)


def ask(socket: str | None) -> Sequence[pb.NamespaceInfo]:
    """What the service says of its namespaces."""
    reply: pb.NamespacesReply = call_admin(socket, "Namespaces", pb.NamespacesRequest())
    return list(reply.namespaces)


def choose(found: Sequence[pb.NamespaceInfo], wanted: str, tenant: str | None) -> pb.NamespaceInfo:
    """The one whose digest begins with `wanted`, or whose model it is. Raises NotFound, InvalidArgument for several."""
    matching = [
        info
        for info in found
        if (info.digest.hex().startswith(wanted.lower()) or _part(info, "model") == wanted)
        and (tenant is None or _part(info, "tenant") == tenant)
    ]
    with_blocks = [info for info in matching if info.blocks] or matching
    if not with_blocks:
        raise NotFound(f"no namespace {wanted!r}: `kvstore namespaces` lists them")
    if len(with_blocks) > 1:
        names = ", ".join(info.digest.hex()[:_SHOWN_DIGITS] for info in with_blocks)
        raise InvalidArgument(f"{wanted!r} is the name of several namespaces: choose one of {names}")
    return with_blocks[0]


def _part(info: pb.NamespaceInfo, tag: str) -> str | None:
    return next((_text(part.value) for part in info.parts if part.tag == tag), None)


def _parts(info: pb.NamespaceInfo) -> dict[str, str]:
    return {part.tag: "…" if part.tag in _HIDDEN else _text(part.value) for part in info.parts}


def _text(value: bytes) -> str:
    """As text where it is some, else hexadecimal."""
    text = value.decode(errors="replace")
    return text if text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text else value.hex()


def _as_dict(info: pb.NamespaceInfo) -> Mapping[str, object]:
    """Without the key, which is a secret."""
    return {
        "digest": info.digest.hex(),
        "parts": _parts(info),
        "adopted_key": info.adopted,
        "blocks": info.blocks,
        "hbm_blocks": info.hbm_blocks,
        "dram_blocks": info.dram_blocks,
        "nvme_blocks": info.nvme_blocks,
    }
