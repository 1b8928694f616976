"""What can be wrong with a model or a request; each message is one line that says what to do."""

from kvstore.errors import InvalidArgument

__all__ = ["InvalidRequest", "ModelError"]


class ModelError(InvalidArgument, ValueError):
    """A model that is not there, is damaged, or is of a kind that the engine cannot run."""


class InvalidRequest(InvalidArgument, ValueError):
    """A request that can never run: empty, longer than the model or the pool, or with sampling out of range."""
