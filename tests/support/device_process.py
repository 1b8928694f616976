"""A process that owns a device and does what it is told over a socket, until it is killed.

python -m tests.support.device_process KIND SOCKET_FD

One packet a command, as JSON, with a descriptor where it carries memory; one packet an answer. `DeviceProcess` is the
other side, which has no device.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from kvstore.client import DeviceSpec
from kvstore.client.device import open_device
from kvstore.errors import KvstoreError
from tiers.base import DeviceTier

__all__ = ["DeviceProcess", "pattern"]

_RANGE_BYTES = 16 << 30
_TIMEOUT_S = 60.0


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that tell seeds and places apart."""
    return np.random.default_rng(seed).bytes(nbytes)


class DeviceProcess:
    """A started process; `ready` waits until it has opened its device, so that several can start side by side."""

    def __init__(self, kind: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_TIMEOUT_S)
        command = [sys.executable, "-m", "tests.support.device_process", kind, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def ready(self) -> dict[str, Any]:
        """Its device: identity, uuid, granularity_bytes, sharing."""
        return self._answer()[0]

    def ask(self, do: str, fd: int | None = None, **arguments: object) -> dict[str, Any]:
        """Sends a command; its answer, without a descriptor. `fd` stays the caller's."""
        _send(self._socket, {"do": do, **arguments}, fd)
        return self._answer()[0]

    def make(self, *, extent: int, nbytes: int) -> int:
        """A new extent, mapped there; its descriptor is the caller's."""
        _send(self._socket, {"do": "make", "extent": extent, "nbytes": nbytes}, None)
        answer, fd = self._answer()
        assert fd is not None, answer
        return fd

    def kill(self) -> None:
        """SIGKILL, and reaps it."""
        self.process.kill()
        self.process.wait(_TIMEOUT_S)
        self._socket.close()

    def _answer(self) -> tuple[dict[str, Any], int | None]:
        received = _receive(self._socket)
        assert received is not None, "the process has ended"
        return received


def _send(sock: socket.socket, message: dict[str, Any], fd: int | None) -> None:
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]).tobytes())]
    sock.sendmsg([json.dumps(message).encode()], rights)


def _receive(sock: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    data, ancillary, _, _ = sock.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i", b"".join(payload for _, _, payload in ancillary))
    return (json.loads(data), fds[0] if fds else None) if data else None


def _obey(tier: DeviceTier, command: dict[str, Any], fd: int | None) -> tuple[dict[str, Any], int | None]:
    extent = command["extent"]
    match command["do"]:
        case "make":
            made = tier.new_extent(command["nbytes"])
            tier.adopt(extent, os.dup(made), command["nbytes"])
            return {}, made
        case "adopt":
            assert fd is not None
            tier.adopt(extent, fd, command["nbytes"])
        case "fill":
            address = tier.base + tier.offset(extent) + command.get("at", 0)
            tier.write(address, pattern(command["seed"], command["nbytes"]))
        case "check":
            address = tier.base + tier.offset(extent) + command.get("at", 0)
            expected = pattern(command["seed"], command["nbytes"])
            return {"equal": tier.read(address, command["nbytes"]) == expected}, None
        case "drop":
            tier.drop(extent)
    return {}, None


def main() -> None:
    """See the module."""
    kind, number = sys.argv[1:]
    sock = socket.socket(fileno=int(number))
    device = open_device(DeviceSpec(hbm_bytes=0, kind=kind))
    tier = device.reserve(_RANGE_BYTES)
    about = {
        "identity": device.identity,
        "uuid": device.uuid,
        "granularity_bytes": device.granularity_bytes,
        "sharing": tier.sharing.value,
    }
    _send(sock, about, None)
    while (received := _receive(sock)) is not None:
        answer: dict[str, Any]
        try:
            answer, made = _obey(tier, *received)
        except KvstoreError as error:
            answer, made = {"error": type(error).__name__, "text": str(error)}, None
        _send(sock, answer, made)
        if made is not None:
            os.close(made)


if __name__ == "__main__":
    main()
