"""The compiled hash chain and its twin in Python, against hashlib and against each other."""

from __future__ import annotations

import hashlib
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.hash_chain import IS_COMPILED, hash_chain, hash_chain_in_python

ROOT = Path(__file__).resolve().parents[2]
Chain = Callable[[bytes, bytes, bytes, int], bytes]

needs_compiled = pytest.mark.skipif(not IS_COMPILED, reason="the hash chain was built without a C compiler")


@pytest.fixture(params=[pytest.param("compiled", marks=needs_compiled), "python"])
def chain(request: pytest.FixtureRequest) -> Chain:
    """Each implementation."""
    return hash_chain if request.param == "compiled" else hash_chain_in_python


def test_the_vector_of_the_protocol(chain: Chain) -> None:
    """docs/protocol.md: tokens 0 to 9 in blocks of four."""
    key = bytes.fromhex("a9877c4d3cb99f4edebb1e9997d43cf98c67943a2f663e1761b689204af1baaf")
    data = np.arange(10, dtype="<u4").tobytes()
    expected = "41055372f3b55b4cc67972e8be3d1e2415c7abf6e2158360b584a79e9650dea4"
    assert chain(key, bytes(16), data, 16).hex() == expected


# Around 112 bytes the message, the parent's 16 before it, ends exactly with a block of BLAKE2b; around 240 with two.
@pytest.mark.parametrize("block_bytes", [1, 4, 64, 111, 112, 113, 128, 239, 240, 241, 368, 1024])
@pytest.mark.parametrize("key_bytes", [0, 1, 32, 63, 64])
def test_equals_hashlib_at_every_edge(chain: Chain, block_bytes: int, key_bytes: int) -> None:
    key, parent = bytes(range(1, key_bytes + 1)), bytes(range(16))
    data = np.random.default_rng(block_bytes).bytes(3 * block_bytes + block_bytes - 1)
    expected, previous = b"", parent
    for at in range(0, 3 * block_bytes, block_bytes):
        message = previous + data[at : at + block_bytes]
        previous = hashlib.blake2b(message, digest_size=16, key=key).digest()
        expected += previous
    assert chain(key, parent, data, block_bytes) == expected


@needs_compiled
@given(
    key=st.binary(max_size=64),
    parent=st.binary(min_size=16, max_size=16),
    data=st.binary(max_size=700),
    block_bytes=st.integers(1, 300),
)
def test_compiled_and_python_give_the_same(key: bytes, parent: bytes, data: bytes, block_bytes: int) -> None:
    """Were they to differ, a process with a compiler and one without would never find each other's blocks."""
    assert hash_chain(key, parent, data, block_bytes) == hash_chain_in_python(key, parent, data, block_bytes)


@pytest.mark.parametrize(
    "key_bytes,parent_bytes,block_bytes", [(65, 16, 4), (32, 15, 4), (32, 17, 4), (32, 16, 0), (32, 16, -4)]
)
def test_malformed_calls_are_refused(
    chain: Chain, key_bytes: int, parent_bytes: int, block_bytes: int
) -> None:
    with pytest.raises(ValueError, match=r"parent|maximum"):
        chain(bytes(key_bytes), bytes(parent_bytes), bytes(64), block_bytes)


def test_an_array_is_taken_without_a_copy_and_a_strided_one_refused(chain: Chain) -> None:
    tokens = np.arange(64, dtype="<u4")
    assert chain(bytes(32), bytes(16), tokens, 128) == chain(bytes(32), bytes(16), tokens.tobytes(), 128)  # type: ignore[arg-type]
    if chain is hash_chain:
        with pytest.raises((BufferError, ValueError), match="contiguous"):
            chain(bytes(32), bytes(16), tokens[::2], 128)  # type: ignore[arg-type]


@needs_compiled
def test_other_threads_run_while_it_hashes() -> None:
    """The engine's scheduler must not stand still while a long prompt is hashed."""
    data = bytes(64 << 20)
    ticks, stop = 0, threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        hash_chain(bytes(32), bytes(16), data, 128)  # about 0.2 s
    finally:
        stop.set()
        thread.join()
    assert ticks > 5


def test_without_the_compiled_one_python_is_used() -> None:
    """What a machine without a C compiler gets: the same hashes."""
    script = (
        "import sys; sys.modules['kvstore._hash_chain'] = None\n"
        "from kvstore.hash_chain import IS_COMPILED\nfrom kvstore.identity import hash_blocks\n"
        "print(IS_COMPILED, hash_blocks(bytes(32), bytes(16), list(range(64)), 32).tobytes().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    expected = hash_chain(bytes(32), bytes(16), np.arange(64, dtype="<u4").tobytes(), 128)
    assert done.stdout.split() == ["False", expected.hex()]


def test_no_compiler_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old build would be of another source than the one that lies there."""
    build = runpy.run_path(str(ROOT / "kvstore" / "native" / "build.py"))["build"]
    target = tmp_path / "_hash_chain.abi3.so"
    source = ROOT / "kvstore" / "native" / "hash_chain.c"
    target.write_bytes(b"old")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build(target, source) == "there is no C compiler no-such-compiler"
    assert list(tmp_path.iterdir()) == []
    target.write_bytes(b"old")
    monkeypatch.setenv("CC", "false")
    problem = build(target, source)
    assert problem is not None
    assert problem.startswith("false failed")
    assert "\n" not in problem
    assert list(tmp_path.iterdir()) == []
