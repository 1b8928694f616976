"""The one place where errors become gRPC status codes, for unary calls and for messages of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from kvstore.daemon.counters import Counters
from kvstore.daemon.log import Log
from kvstore.errors import DeadlineExceeded, KvstoreError
from kvstore.wire.v1 import kvstore_pb2 as pb

__all__ = ["RETRY_AFTER_METADATA", "Context", "abort", "answer", "code_number", "stream_error"]

RETRY_AFTER_METADATA = "kvstore-retry-after-ms"
"""Trailing metadata of a failed call that can be tried again: after how many milliseconds, as decimal text."""

_LOG = Log("rpc")

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def answer(
    call: Callable[[Request], Awaitable[Reply]],
    request: Request,
    context: Context,
    counters: Counters,
    limit_s: float,
) -> Reply:
    """Runs one unary call; its KvstoreError becomes a status, anything else INTERNAL with a log line."""
    try:
        return await asyncio.wait_for(call(request), limit_s)
    except TimeoutError:
        counters.add("calls_failed_total")
        await abort(context, DeadlineExceeded(f"not done within {limit_s:g} s"))
    except KvstoreError as error:
        counters.add("calls_failed_total")
        await abort(context, error)
    except Exception:  # noqa: BLE001 (an RPC boundary: a fault in one call must not end the daemon)
        counters.add("internal_errors_total")
        _LOG.fault("call failed", call=getattr(call, "__name__", "?"))
        await abort(context, KvstoreError("the daemon failed at this call; its log says how"))


async def abort(context: Context, error: KvstoreError) -> NoReturn:
    """Ends a call with the status of `error`."""
    trailing = ()
    if error.retry_after_s is not None:
        trailing = ((RETRY_AFTER_METADATA, str(_retry_ms(error))),)  # type: ignore[assignment]
    await context.abort(grpc.StatusCode[error.grpc_code], str(error), trailing)
    raise AssertionError("abort returned")


def code_number(error: KvstoreError) -> int:
    """The number of the status code."""
    number: int = grpc.StatusCode[error.grpc_code].value[0]
    return number


def stream_error(message_id: int, error: KvstoreError) -> pb.StreamError:
    """The answer to a message that was refused."""
    return pb.StreamError(
        id=message_id, code=code_number(error), message=str(error)[:400], retry_after_ms=_retry_ms(error)
    )


def _retry_ms(error: KvstoreError) -> int:
    return 0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000))
