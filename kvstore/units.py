"""Sizes and durations as people write them: `8GiB`, `512MiB`, `100G`, `1.5TiB`; `120s`, `2m`, `500ms`.

Owns the two grammars and nothing else. Parsing is exact: `1.5TiB` is computed in integers, never through a float.
Suffixes of sizes, in any case: `B`, `K KB M MB G GB T TB P PB` are powers of 1,000; `KiB MiB GiB TiB PiB` (or `Ki` …)
are powers of 1,024. A bare number is bytes, or seconds. Errors are `InvalidArgument` with a line that shows what
was written and what would do.
"""

from __future__ import annotations

import re
from decimal import Decimal

from kvstore.errors import InvalidArgument

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "TIB",
    "format_count",
    "format_duration",
    "format_size",
    "parse_duration",
    "parse_size",
    "write_duration",
    "write_size",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-zµ]*)\s*", re.ASCII)

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE_UNITS: dict[str, int] = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZE_UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power}
    _SIZE_UNITS |= {f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}

_SECOND = Decimal(1)
_DURATION_UNITS: dict[str, Decimal] = {
    "": _SECOND,
    "ns": _SECOND / 10**9,
    "us": _SECOND / 10**6,
    "µs": _SECOND / 10**6,
    "ms": _SECOND / 1000,
    "s": _SECOND,
    "m": _SECOND * 60,
    "min": _SECOND * 60,
    "h": _SECOND * 3600,
    "d": _SECOND * 86400,
}
_EXACT_UNITS = tuple(
    (unit, 1024**power) for power, unit in reversed(tuple(enumerate(_BINARY))) if power
) + tuple((f"{letter}B", 1000**power) for power, letter in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")))
_MAX_SIZE_BYTES = (1 << 63) - 1  # offsets are signed 64-bit numbers in every system call


def parse_size(text: str) -> int:
    """Bytes in `text`, for example `8GiB`, `512MiB`, `100G`, `1.5TiB`, `4096`.

    Raises InvalidArgument where it is no size, is not a whole number of bytes, or does not fit 63 bits.
    """
    number, unit = _split(text, "size", "8GiB, 512MiB or 100G")
    factor = _SIZE_UNITS.get(unit.lower())
    if factor is None:
        raise InvalidArgument(f"unknown unit {unit!r} in size {text!r}: write it like 8GiB, 512MiB or 100G")
    size = number * factor
    if size != size.to_integral_value():
        raise InvalidArgument(f"size {text!r} is not a whole number of bytes")
    if size > _MAX_SIZE_BYTES:
        raise InvalidArgument(f"size {text!r} is larger than 8 EiB")
    return int(size)


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people, in the largest binary unit, rounded to two decimals: `8GiB`, `1.5TiB`, `100B`."""
    if size_bytes < 0:
        return f"-{format_size(-size_bytes)}"
    power = 0
    while power + 1 < len(_BINARY) and size_bytes >= 1024 ** (power + 1):
        power += 1
    value = Decimal(size_bytes) / 1024**power
    return f"{_plain(value, decimals=2)}{_BINARY[power]}"


def write_size(size_bytes: int) -> str:
    """`size_bytes` in a form that parses back to the same number: `8GiB`, `100GB`, and bytes where no unit is exact."""
    exact = [
        f"{_plain(Decimal(size_bytes) / factor, decimals=2)}{unit}"
        for unit, factor in _EXACT_UNITS
        if size_bytes >= factor and size_bytes * 100 % factor == 0
    ]
    return min(exact, key=len, default=str(size_bytes))


def parse_duration(text: str) -> float:
    """Seconds in `text`, for example `120s`, `500ms`, `2m`, `1.5h`, `30`.

    Raises InvalidArgument where it is no duration.
    """
    number, unit = _split(text, "duration", "120s, 500ms or 2m")
    factor = _DURATION_UNITS.get(unit.lower())
    if factor is None:
        raise InvalidArgument(f"unknown unit {unit!r} in duration {text!r}: write it like 120s, 500ms or 2m")
    return float(number * factor)


def format_duration(duration_s: float) -> str:
    """`duration_s` for people, in the unit that suits its magnitude: `350µs`, `12.5ms`, `2s`, `2m`, `1.5h`."""
    if duration_s < 0:
        return f"-{format_duration(-duration_s)}"
    if duration_s == 0:
        return "0s"
    seconds = Decimal(repr(duration_s))
    for unit, most in (("ns", 1e-6), ("µs", 1e-3), ("ms", 1.0), ("s", 60.0), ("m", 3600.0), ("h", 86400.0)):
        if duration_s < most:
            return f"{_plain(seconds / _DURATION_UNITS[unit], decimals=2)}{unit}"
    return f"{_plain(seconds / _DURATION_UNITS['d'], decimals=2)}d"


def write_duration(duration_s: float) -> str:
    """`duration_s` in a form that parses back to the same number: `2m` where that is exact, else seconds."""
    pretty = format_duration(duration_s)
    return pretty if parse_duration(pretty) == duration_s else f"{Decimal(repr(duration_s)):f}"


def format_count(count: int) -> str:
    """`count` with thousands separated: `1,048,576`."""
    return f"{count:,}"


def _split(text: str, what: str, examples: str) -> tuple[Decimal, str]:
    """The number and the unit of `text`."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"{text!r} is no {what}: write it like {examples}")
    return Decimal(match[1].replace("_", "").replace(",", "")), match[2]


def _plain(value: Decimal, *, decimals: int) -> str:
    """`value` without an exponent and without trailing zeros, rounded to `decimals` places."""
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
