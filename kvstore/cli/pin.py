"""Keep the blocks of a prompt from eviction for a time, or let them go again.

What is asked of the daemon; `engine_adapter.cli.pin` has the commands.
"""

from __future__ import annotations

import json

from kvstore.cli.admin import call_admin, open_client
from kvstore.cli.prompt_blocks import Prompt, opened
from kvstore.units import format_count, format_duration
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["pin_prompt", "unpin_prompt"]


def pin_prompt(prompt: Prompt, *, ttl_s: int, owner: str, socket: str | None, as_json: bool) -> None:
    """Pins what is cached of the prompt from its beginning, and prints how much that is."""
    with open_client(socket) as client, opened(client, prompt, "pin") as found:
        request = pb.PinRequest(
            namespace=found.namespace, hashes=found.hashes.tobytes(), ttl_s=ttl_s, owner=owner
        )
        pinned = call_admin(socket, "Pin", request).pinned_blocks
    blocks = len(found.hashes)
    if as_json:
        print(json.dumps({"blocks": blocks, "pinned_blocks": pinned, "ttl_s": ttl_s, "owner": owner}))
        return
    print(f"{format_count(pinned)} of {format_count(blocks)} blocks stay for {format_duration(ttl_s)}")
    if pinned < blocks:
        print("what is not cached cannot be pinned: ask the engine once, and pin again")


def unpin_prompt(prompt: Prompt, *, owner: str, socket: str | None, as_json: bool) -> None:
    """Takes an owner's pins of the prompt back, without an owner everybody's, and prints of how many blocks."""
    with open_client(socket) as client, opened(client, prompt, "unpin") as found:
        request = pb.UnpinRequest(namespace=found.namespace, hashes=found.hashes.tobytes(), owner=owner)
        unpinned = call_admin(socket, "Unpin", request).unpinned_blocks
    if as_json:
        print(json.dumps({"blocks": len(found.hashes), "unpinned_blocks": unpinned, "owner": owner}))
        return
    print(f"{format_count(unpinned)} blocks were pinned and may go again")
