"""What vLLM's connector class has and what ours makes of it, as JSON: `python -m tests.vllm.contract` beside a vLLM."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from engine_adapter.vllm import KvstoreConnector


def _parameters(owner: type, name: str) -> list[str] | None:
    """Names of a method's parameters; None: it is a property."""
    member: Any = inspect.getattr_static(owner, name)
    return None if isinstance(member, property) else [*inspect.signature(getattr(owner, name)).parameters]


def main() -> None:
    """`hooks`: by name, the parameters on both sides and whether ours is its own. `abstract`: what is left undone."""
    hooks = {}
    for base in (KVConnectorBase_V1, SupportsHMA):
        for name in sorted(set(dir(base)) - set(dir(object))):
            if not name.startswith("_"):
                own = name in vars(KvstoreConnector)
                hooks[name] = {
                    "theirs": _parameters(base, name),
                    "ours": _parameters(KvstoreConnector, name) if own else None,
                    "own": own,
                }
    json.dump({"hooks": hooks, "abstract": sorted(KvstoreConnector.__abstractmethods__)}, sys.stdout)


if __name__ == "__main__":
    main()
