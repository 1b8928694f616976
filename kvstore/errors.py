"""The errors of kvstore: one tree, and for each error the one gRPC status code that carries it.

    KvstoreError              INTERNAL             a fault of ours
    ├── InvalidArgument       INVALID_ARGUMENT     the call can never succeed as it is
    │   └── ConfigError       INVALID_ARGUMENT     a flag, variable or file is wrong: one line says what to do
    ├── NotFound              NOT_FOUND            no such session, namespace, lease or block
    ├── AlreadyExists         ALREADY_EXISTS       the name is taken (a second daemon on one socket)
    ├── FailedPrecondition    FAILED_PRECONDITION  right call, wrong state (stale handle, other boot epoch)
    │   └── MissingExtra      FAILED_PRECONDITION  an optional part of the installation is needed
    ├── ResourceExhausted     RESOURCE_EXHAUSTED   a bound was reached; `retry_after_s` says when to ask again
    ├── PermissionDenied      PERMISSION_DENIED    the peer may not do this
    ├── Unauthenticated       UNAUTHENTICATED      the peer did not prove who it is
    ├── Aborted               ABORTED              lost a race (revoked lease); start over
    ├── Unavailable           UNAVAILABLE          the daemon is away, starting or draining; `retry_after_s` as above
    ├── DeadlineExceeded      DEADLINE_EXCEEDED    no answer in time; what was asked may still happen
    ├── Unimplemented         UNIMPLEMENTED        known to the protocol, not offered by this peer
    └── Corruption            DATA_LOSS            bytes are not what was stored; never served, counted as a miss

The code is a class attribute (`grpc_code`, the name of a `grpc.StatusCode` member), so this module needs no grpc.
`from_grpc_code` is the way back, for clients. `exit_code` is what the command line exits with.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "Aborted",
    "AlreadyExists",
    "ConfigError",
    "Corruption",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "KvstoreError",
    "MissingExtra",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "from_grpc_code",
]


class KvstoreError(Exception):
    """Root of the tree. The message is one line that a person can act on."""

    grpc_code: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        """Seconds after which asking again makes sense; None where it makes none, or is not known."""

    def __str__(self) -> str:
        return self.message


class InvalidArgument(KvstoreError):
    """The call can never succeed as it is: a malformed or out-of-range argument."""

    grpc_code = "INVALID_ARGUMENT"
    exit_code = 2


class ConfigError(InvalidArgument):
    """A flag, an environment variable or a configuration file is wrong."""


class NotFound(KvstoreError):
    """No such session, namespace, lease, block or file."""

    grpc_code = "NOT_FOUND"


class AlreadyExists(KvstoreError):
    """The name is taken, for example by a second daemon on one socket."""

    grpc_code = "ALREADY_EXISTS"


class FailedPrecondition(KvstoreError):
    """The call is well formed, but not in this state: a stale handle, another boot epoch."""

    grpc_code = "FAILED_PRECONDITION"


class MissingExtra(FailedPrecondition):
    """An optional part of the installation is needed; the message names the extra to install."""


class ResourceExhausted(KvstoreError):
    """A bound was reached (rows, slots, sessions, a queue); nothing was changed."""

    grpc_code = "RESOURCE_EXHAUSTED"


class PermissionDenied(KvstoreError):
    """The peer is known and may not do this."""

    grpc_code = "PERMISSION_DENIED"


class Unauthenticated(KvstoreError):
    """The peer did not prove who it is."""

    grpc_code = "UNAUTHENTICATED"


class Aborted(KvstoreError):
    """Lost a race, for example a lease that was revoked; start over from the last good state."""

    grpc_code = "ABORTED"


class Unavailable(KvstoreError):
    """The daemon is away, starting or draining. An engine goes on as if there were no cache."""

    grpc_code = "UNAVAILABLE"


class DeadlineExceeded(KvstoreError):
    """No answer in time. What was asked for may still happen."""

    grpc_code = "DEADLINE_EXCEEDED"


class Unimplemented(KvstoreError):
    """Part of the protocol, but not offered by this peer."""

    grpc_code = "UNIMPLEMENTED"


class Corruption(KvstoreError):
    """Bytes are not what was stored. The block is removed and counted as a miss, never served."""

    grpc_code = "DATA_LOSS"


_BY_CODE: dict[str, type[KvstoreError]] = {
    error.grpc_code: error
    for error in (
        KvstoreError,
        InvalidArgument,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        ResourceExhausted,
        PermissionDenied,
        Unauthenticated,
        Aborted,
        Unavailable,
        DeadlineExceeded,
        Unimplemented,
        Corruption,
    )
}


def from_grpc_code(code: str, message: str, *, retry_after_s: float | None = None) -> KvstoreError:
    """The error that a status code (the name of a `grpc.StatusCode` member) stands for.

    A code that no error of the tree maps to gives the root, with the code in its message.
    """
    error = _BY_CODE.get(code)
    if error is None:
        return KvstoreError(f"{code}: {message}", retry_after_s=retry_after_s)
    return error(message, retry_after_s=retry_after_s)
