"""Versions of a framework that its adapter is known to work with."""

from __future__ import annotations

from importlib.metadata import version

from ebbtide.errors import UnsupportedError, warn_user


def require(package: str, oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Refuses a version that is too old, and warns of one that the adapter was not tested with."""
    installed = version(package)
    found = tuple(int(part) for part in installed.split(".")[:2])
    if found < oldest:
        raise UnsupportedError(
            f"ebbtide.integrations.{package}: expected {package} {oldest[0]}.{oldest[1]} or newer, found {installed}: "
            f"pip install -U {package}"
        )
    if found > newest:
        warn_user(
            f"{package} {installed} is newer than {newest[0]}.{newest[1]}, the newest that ebbtide was tested with"
        )
