"""The blocks of a prompt, for commands that ask or say something of them: `explain`, `pin`, `unpin`.

Blocks are named by hash, and a hash by everything that makes KV interchangeable: the parts of a namespace. Two files
say it for an engine of one's own: the parts (a JSON object of tag to text, or to {"hex": "…"}) and the token ids (a
JSON list). For the bundled engine `engine_adapter.cli.prompts` knows both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client.connect import Client
from kvstore.errors import InvalidArgument
from kvstore.identity import HashChain
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["OpenedPrompt", "Prompt", "opened", "read_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens, and all that makes their KV interchangeable."""

    parts: Mapping[str, bytes]
    token_ids: list[int]
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedPrompt:
    """The same as the daemon knows it, while it is open. `hashes`: [n, 2] of its full blocks."""

    token: bytes
    namespace: int
    hashes: NDArray[np.uint64]


@contextmanager
def opened(client: Client, prompt: Prompt, name: str) -> Iterator[OpenedPrompt]:
    """A short session reaches the namespace; the daemon shows it as `name`."""
    block_tokens = prompt.block_tokens
    group = pb.LayerGroup(rule=pb.HIT_RULE_ALL, layers=1, kv_heads=1, head_dim=1, block_tokens=block_tokens)
    attached = client.call(
        "Attach", pb.AttachRequest(protocol_version=1, name=name, groups=[group], dtype="float32")
    )
    try:
        found = client.call(
            "OpenNamespace",
            pb.OpenNamespaceRequest(
                token=attached.token,
                parts=[pb.NamespacePart(tag=tag, value=value) for tag, value in prompt.parts.items()],
            ),
        )
        hashes = HashChain(found.key, block_tokens, prompt.token_ids).hashes
        yield OpenedPrompt(token=attached.token, namespace=found.namespace, hashes=hashes)
    finally:
        client.call("Detach", pb.DetachRequest(token=attached.token))


def read_files(namespace: Path, tokens: Path) -> Prompt:
    """The prompt in two files. Raises InvalidArgument for files that are not as they must be."""
    parts = _parts(_load(namespace), namespace)
    token_ids = _load(tokens)
    if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise InvalidArgument(f"{tokens}: a JSON list of token ids is needed")
    return Prompt(parts=parts, token_ids=token_ids, block_tokens=_block_tokens(parts, namespace))


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error


def _parts(loaded: Any, path: Path) -> dict[str, bytes]:
    if not isinstance(loaded, dict):
        raise InvalidArgument(f"{path}: a JSON object of tag to text is needed")
    parts = {}
    for tag, value in loaded.items():
        if isinstance(value, dict) and isinstance(value.get("hex"), str):
            try:
                parts[tag] = bytes.fromhex(value["hex"])
            except ValueError:
                raise InvalidArgument(f"{path}: the part {tag!r} is not hexadecimal") from None
        elif isinstance(value, str):
            parts[tag] = value.encode()
        else:
            raise InvalidArgument(f'{path}: the part {tag!r} is neither text nor {{"hex": "…"}}')
    return parts


def _block_tokens(parts: Mapping[str, bytes], path: Path) -> int:
    text = parts.get("block_tokens", b"").decode(errors="replace")
    if not text.isdecimal() or not int(text):
        raise InvalidArgument(f"{path}: the part 'block_tokens' must be a number")
    return int(text)
