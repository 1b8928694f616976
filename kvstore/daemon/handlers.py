"""Handlers of a service for grpc, made from the protocol's own description of it.

As the generated code makes them, but for bytes that are no message of their call. grpc ends such a call as UNKNOWN;
here it is INVALID_ARGUMENT, and in the middle of a stream a `Malformed` comes in the message's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvstore.daemon.rpc import Context, abort
from kvstore.errors import InvalidArgument

__all__ = ["MALFORMED", "Malformed", "service_handlers"]


class Malformed:
    """Stands for a message that could not be read."""

    error = InvalidArgument("these bytes are no message of this call")


MALFORMED: Final = Malformed()


def service_handlers(
    service: ServiceDescriptor, calls: Mapping[str, Any]
) -> grpc.GenericRpcHandler[Any, Any]:
    """Of all methods of `service` that `calls` has by name; grpc answers UNIMPLEMENTED for the others.

    A call takes (request, context), or (requests, context) of a stream, as in the generated code.
    """
    handlers = {
        method.name: _handler(method, calls[method.name])
        for method in service.methods
        if method.name in calls
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(method: MethodDescriptor, call: Any) -> grpc.RpcMethodHandler[Any, Any]:
    parse = _parser(GetMessageClass(method.input_type))
    pack: Callable[[Any], bytes] = GetMessageClass(method.output_type).SerializeToString
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(call, parse, pack)
    if method.server_streaming:

        async def streamed(request: Any, context: Context) -> Any:
            if request is MALFORMED:
                await abort(context, MALFORMED.error)
            async for reply in call(request, context):
                yield reply

        return grpc.unary_stream_rpc_method_handler(streamed, parse, pack)

    async def unary(request: Any, context: Context) -> Any:
        if request is MALFORMED:
            await abort(context, MALFORMED.error)
        return await call(request, context)

    return grpc.unary_unary_rpc_method_handler(unary, parse, pack)


def _parser(kind: type[Message]) -> Callable[[bytes], Message | Malformed]:
    def parse(packed: bytes) -> Message | Malformed:
        try:
            return kind.FromString(packed)
        except Exception:  # noqa: BLE001 (protobuf's DecodeError has no one home over its versions)
            return MALFORMED

    return parse
