"""Compile the native kernels, find them, load them. `python -m ebbtide.kernels.build` does it ahead of use.

The library lies beside its source, or in the user's cache folder where that can't be written. Its name
carries a hash of source and flags: another version never loads it. Without a compiler: a warning, and the
fallback.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "adam.cpp", FOLDER / "crc.cpp")
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No contraction; the other two free the compiler to vectorise and change no result."""
FLAGS = ("-O3", "-fPIC", "-shared", "-std=c++17", *EXACT)


class BuildError(Exception):
    """The kernels could not be compiled; the text says why."""


def file_name() -> str:
    identity = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES))
    identity.update(" ".join((*FLAGS, platform.system(), platform.machine())).encode())
    return f"_kernels_{identity.hexdigest()[:16]}.so"


def folders() -> tuple[Path, Path]:
    """Where the library may lie: beside the source, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return FOLDER, Path(cache) / "ebbtide"


def find() -> Path | None:
    return next((path for folder in folders() if (path := folder / file_name()).exists()), None)


def compiler() -> str | None:
    candidates = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def build() -> Path:
    """Compile into the first folder that can be written; raises BuildError."""
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler found (looked for $CXX, g++, clang++, c++)")
    folder = next(filter(_can_write, folders()), None)
    if folder is None:
        raise BuildError(f"none of {', '.join(map(str, folders()))} can be written")
    target = folder / file_name()
    handle, scratch = tempfile.mkstemp(prefix="_building_", suffix=".so", dir=folder)
    os.close(handle)
    try:
        done = subprocess.run(
            [command, *FLAGS, *map(str, SOURCES), "-o", scratch], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise BuildError(f"{command} failed:\n{done.stderr.strip()}")
        os.chmod(scratch, 0o755)
        os.replace(scratch, target)
    finally:
        Path(scratch).unlink(missing_ok=True)
    if folder == FOLDER:
        for old in folder.glob("_kernels_*.so"):
            if old != target:
                old.unlink(missing_ok=True)
    return target


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The native kernels, compiled on first use; None, after a warning, where that is not possible."""
    try:
        return ctypes.CDLL(str(find() or build()))
    except (BuildError, OSError) as error:
        warnings.warn(
            f"ebbtide updates parameters through plain torch, about ten times as slow: {error}\n"
            "Install a C++ compiler and run `python -m ebbtide.kernels.build`.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def main() -> int:
    try:
        print(build())
    except (BuildError, OSError) as error:
        print(f"the native kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
