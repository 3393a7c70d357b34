"""Compile the native libraries, find them, load them. `python -m ebbtide.kernels.compiler` does it ahead of use.

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
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""No contraction; the other two free the compiler to vectorise and change no result."""
FLAGS = ("-fPIC", "-shared", "-std=c++17")


class BuildError(Exception):
    """The kernels could not be compiled; the text says why."""


@dataclass(frozen=True)
class Library:
    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    belongs_to: str = ""
    """What else it is compiled against."""

    @property
    def file_name(self) -> str:
        identity = hashlib.sha256(b"".join(source.read_bytes() for source in self.sources))
        identity.update(
            " ".join((*self.flags, platform.system(), platform.machine(), self.belongs_to)).encode()
        )
        return f"_{self.name}_{identity.hexdigest()[:16]}.so"

    def find(self) -> Path | None:
        return next((path for folder in folders() if (path := folder / self.file_name).exists()), None)

    def build(self) -> Path:
        """Compile into the first folder that can be written; raises BuildError."""
        folder = next(filter(_can_write, folders()), None)
        if folder is None:
            raise BuildError(f"none of {', '.join(map(str, folders()))} can be written")
        return self.build_in(folder)

    def build_in(self, folder: Path) -> Path:
        command = compiler()
        if command is None:
            raise BuildError("no C++ compiler found (looked for $CXX, g++, clang++, c++)")
        target = folder / self.file_name
        handle, scratch = tempfile.mkstemp(prefix="_building_", suffix=".so", dir=folder)
        os.close(handle)
        try:
            done = subprocess.run(
                [command, *map(str, self.sources), *self.flags, "-o", scratch], capture_output=True, text=True
            )
            if done.returncode != 0:
                raise BuildError(f"{command} failed:\n{done.stderr.strip()}")
            os.chmod(scratch, 0o755)
            os.replace(scratch, target)
        finally:
            Path(scratch).unlink(missing_ok=True)
        if folder == FOLDER:
            for old in folder.glob(f"_{self.name}_*.so"):
                if old != target:
                    old.unlink(missing_ok=True)
        return target

    def load(self) -> ctypes.CDLL:
        """Compiled on first use; raises BuildError or OSError."""
        return ctypes.CDLL(str(self.find() or self._build_aloud()))

    def _build_aloud(self) -> Path:
        """Half a minute without a word would look like a hang."""
        if compiler() is None:
            return self.build()  # raises
        print(
            f"ebbtide: compiling its {self.name}, once for this version; this takes half a minute",
            file=sys.stderr,
        )
        start = time.monotonic()
        built = self.build()
        print(f"ebbtide: compiled {built} in {time.monotonic() - start:.0f} s", file=sys.stderr)
        return built


KERNELS = Library(
    "kernels",
    tuple(FOLDER / name for name in ("native.cpp", "crc.cpp", "pages.cpp")),
    ("-O3", *FLAGS, *EXACT),
)


def allocator() -> Library:
    """What torch's allocator is replaced with, for the torch that is installed."""
    import torch

    place = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return Library(
        "allocator",
        (FOLDER / "allocator.cpp",),
        ("-O2", *FLAGS, abi, f"-I{place / 'include'}", f"-L{place / 'lib'}", "-lc10"),
        torch.__version__,
    )


def folders() -> tuple[Path, Path]:
    """Where the library may lie: beside the source, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return FOLDER, Path(cache) / "ebbtide"


def compiler() -> str | None:
    candidates = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


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
        return KERNELS.load()
    except (BuildError, OSError) as error:
        from ebbtide.errors import warn_user  # not above: setup.py loads this file alone

        warn_user(
            f"ebbtide updates parameters through plain torch, about ten times as slow: {error}\n"
            "Install a C++ compiler and run `python -m ebbtide.kernels.compiler`."
        )
        return None


def main() -> int:
    try:
        for library in (KERNELS, allocator()):
            print(library.build())
    except (BuildError, OSError) as error:
        print(f"the native kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
