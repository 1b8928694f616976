"""Reads a GGUF file's header: metadata and where each tensor lies. Tensor bytes stay in the file (memory-mapped).

The `gguf` package's own reader makes a numpy array of every string and takes seconds for a vocabulary of 49,152; a
restarted worker's first token waits for this, so the header is parsed here (0.1 s) and `gguf` only dequantizes.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine.errors import ModelError

__all__ = ["GgufFile", "GgufTensor", "read_gguf"]

_MAGIC = b"GGUF"
_MAX_ITEMS = 1 << 24  # of any count in a header: a damaged file must not make us allocate without bound
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor: `shape` is row-major (outermost first), `offset` is in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A parsed header and the mapped file, `data` is `[file_bytes]`."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]
    data: NDArray[np.uint8]


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        if size < 0 or self.position + size > len(self._data):
            raise struct.error("ends too early")
        piece = self._data[self.position : self.position + size]
        self.position += size
        return piece

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        assert isinstance(value, int | float)
        return value

    def count(self, code: str = "<Q") -> int:
        value = int(self.scalar(code))
        if value > _MAX_ITEMS:
            raise struct.error(f"count {value} is out of range")
        return value

    def string(self) -> str:
        return str(self.take(self.count()), "utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[object]:
        kind, length = int(self.scalar("<I")), self.count()
        if kind == _ARRAY or (kind != _STRING and kind not in _SCALARS):
            raise struct.error(f"unknown array type {kind}")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        code = _SCALARS[kind]
        size = struct.calcsize(code)
        return list(struct.unpack(f"<{length}{code[-1]}", self.take(length * size)))


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of `path`. ModelError names the file when it is missing, damaged or of an unknown version."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    # A plain array: numpy would run Python code for each view of a memmap, and dequantizing makes thousands.
    plain = data.view(np.ndarray)
    try:
        metadata, tensors = _parse(plain.data)
    except struct.error as error:
        raise ModelError(f"{path} is damaged or no GGUF file: {error}") from error
    return GgufFile(path=path, metadata=metadata, tensors=tensors, data=plain)


def _parse(data: memoryview) -> tuple[dict[str, object], dict[str, GgufTensor]]:
    cursor = _Cursor(data)
    if bytes(cursor.take(4)) != _MAGIC:
        raise struct.error("wrong magic")
    version = int(cursor.scalar("<I"))
    if version not in (2, 3):
        raise struct.error(f"version {version} is not supported")
    num_tensors, num_entries = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(int(cursor.scalar("<I")))
    found = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise struct.error(f"alignment {alignment!r} is out of range")
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GgufTensor(name=name, shape=shape, ggml_type=ggml_type, offset=start + offset)
        for name, shape, ggml_type, offset in found
    }
    return metadata, tensors


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.count("<I")
    shape = tuple(cursor.count() for _ in range(num_dims))
    return name, shape[::-1], int(cursor.scalar("<I")), int(cursor.scalar("<Q"))
