"""The error tree."""

from __future__ import annotations

import grpc
import pytest

from kvstore import errors
from kvstore.errors import Corruption, KvstoreError, ResourceExhausted, from_grpc_code

TREE = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, KvstoreError)]


@pytest.mark.parametrize("error", TREE)
def test_each_error_has_a_grpc_code_and_a_line_in_the_tree(error: type[KvstoreError]) -> None:
    assert error.grpc_code in grpc.StatusCode.__members__
    line = next(line for line in (errors.__doc__ or "").splitlines() if f" {error.__name__} " in line)
    assert error.grpc_code in line
    assert error.__name__ in errors.__all__


@pytest.mark.parametrize("error", TREE)
def test_a_code_comes_back_as_an_error_that_handlers_catch(error: type[KvstoreError]) -> None:
    back = from_grpc_code(error.grpc_code, "why", retry_after_s=1.5)
    assert issubclass(error, type(back))
    assert back.grpc_code == error.grpc_code
    assert (str(back), back.retry_after_s) == ("why", 1.5)


def test_an_unmapped_code_keeps_its_name() -> None:
    assert str(from_grpc_code("CANCELLED", "stopped")) == "CANCELLED: stopped"


def test_subclass_and_retry_after() -> None:
    with pytest.raises(KvstoreError):
        raise Corruption("block 7")
    assert ResourceExhausted("full").retry_after_s is None
