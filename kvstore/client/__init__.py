"""The client: `connect()` → `Client.attach()` → `Session`.

Thread contract: one engine thread calls a session's methods; copiers may call `step`, `share_*`, `drop_*`, `take_*` and
`notify` from theirs. Nothing but `open_namespace`, `result`, `wait` and `close` waits.
"""

from kvstore.client.connect import Client, connect
from kvstore.client.copied import Compares, copied, differing
from kvstore.client.credit import SlotRun
from kvstore.client.decision import Decision, TierChange
from kvstore.client.device import DeviceSpec
from kvstore.client.events import Changed, Event, Lost, SealResult
from kvstore.client.grant import PendingGrant
from kvstore.client.memory import DramListener
from kvstore.client.namespace import Namespace
from kvstore.client.retain import StopReason
from kvstore.client.session import Session
from kvstore.client.state import Listener, Targets

__all__ = [
    "Changed",
    "Client",
    "Compares",
    "Decision",
    "DeviceSpec",
    "DramListener",
    "Event",
    "Listener",
    "Lost",
    "Namespace",
    "PendingGrant",
    "SealResult",
    "Session",
    "SlotRun",
    "StopReason",
    "Targets",
    "TierChange",
    "connect",
    "copied",
    "differing",
]
