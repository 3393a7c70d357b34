"""Sizes in bytes as people write them, and rounding."""

from __future__ import annotations

import re
from fractions import Fraction

from ebbtide.errors import ConfigError

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("kB", "MB", "GB", "TB", "PB")
UNITS = {"B": 1, "KB": 1000}
UNITS |= {unit: 1000**power for power, unit in enumerate(_DECIMAL, 1)}
UNITS |= {unit: 1024**power for power, unit in enumerate(_BINARY, 1)}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes: `24GB` is 24e9, `24GiB` is 24 * 2**30, a plain number counts bytes.

    Fractions of a byte are dropped, so that a budget is never larger than what was written.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is not None:
        number, unit = match.groups()
        if not unit and number.isdigit():
            return int(number)
        if unit in UNITS:
            return int(Fraction(number) * UNITS[unit])
    raise ConfigError(
        f"expected a size such as '24GB', '24GiB' or '512MB', found {text!r}{nearest_size(text)}"
    )


_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_WRITTEN = re.compile(r"(\d+(?:[.,]\d+)?)\s*([A-Za-z]*)", re.ASCII)
_NUMBER = re.compile(r"(\d{1,20}(?:\.\d{1,20})?(?:e[+-]?\d{1,2})?)\s*([kMGTP]?)", re.ASCII)


def parse_rate(text: str | int | float) -> float:
    """Bytes a second: `12GB/s`, or a plain number."""
    if isinstance(text, str) and text.strip().endswith("/s"):
        return _above_zero(text, parse_size(text.strip()[:-2].strip()))
    if isinstance(text, int | float) and not isinstance(text, bool):
        return _above_zero(text, text)
    raise ConfigError(f"expected a rate such as '12GB/s', found {text!r}{nearest_rate(text)}")


def parse_flops(text: str | int | float) -> float:
    """Operations a second: `125T` is 125e12, or a plain number."""
    match = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is not None:
        return _above_zero(text, float(match[1]) * _SCALES[match[2]])
    if isinstance(text, int | float) and not isinstance(text, bool):
        return _above_zero(text, text)
    raise ConfigError(f"expected operations a second such as '125T', found {text!r}{nearest_flops(text)}")


def _above_zero(text: object, value: float) -> float:
    if not 0 < value < 1e300:  # an int may be too large for a float
        raise ConfigError(f"expected a number above zero, found {text!r}")
    return float(value)


def nearest_rate(text: object) -> str:
    """The end of a sentence about a wrong rate."""
    match = _WRITTEN.match(text.strip()) if isinstance(text, str) else None
    if match is None:
        return ""
    number, unit = match[1].replace(",", "."), match[2]
    if "bit" in unit.lower() or re.fullmatch(r"[kKMGT]?bp?s?", unit):
        return "; rates count bytes, a byte has 8 bits"
    known = {name.lower(): name for name in UNITS}
    unit = known.get(unit.lower().removesuffix("ps")) or known.get(unit[:1].lower() + "b", "GB")
    return f"; did you mean '{number}{unit}/s'?"


def nearest_flops(text: object) -> str:
    """The end of a sentence about a wrong number of operations a second."""
    match = _WRITTEN.match(text.strip()) if isinstance(text, str) else None
    if match is None:
        return ""
    scales = {scale.lower(): scale for scale in _SCALES}
    return f"; did you mean '{match[1].replace(',', '.')}{scales.get(match[2][:1].lower(), 'T')}'?"


def nearest_size(text: object) -> str:
    """The end of a sentence about a wrong size: what was probably meant.

    Units are case-sensitive because `Gb` and `GB` differ by a factor of eight.
    """
    if isinstance(text, float) and text.is_integer() and text >= 0:
        return f"; did you mean {int(text)}?"
    if not isinstance(text, str):
        return ""
    match = re.search(r"(\d+(?:[.,]\d+)?)\s*([a-z]*)", text.lower().replace("_", ""), re.ASCII)
    if match is None:
        return ""
    number, unit = match[1].replace(",", "."), match[2]
    known = {name.lower(): name for name in UNITS}
    if unit:
        unit = known.get(unit) or known.get(unit + "b") or known.get(unit[0] + "b", "GB")
    elif "." in number:
        unit = "GB"
    return f"; did you mean '{number}{unit}'?"


def format_size(n: int) -> str:
    """`1.50 GiB`: binary units and three significant digits, and still a form that `parse_size` reads."""
    if n < 0:
        return f"-{format_size(-n)}"
    if n < 1024:
        return f"{n} B"
    value = float(n)
    for unit in _BINARY:
        value /= 1024
        if value < 1023.5 or unit == _BINARY[-1]:
            break
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f} {unit}"


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
