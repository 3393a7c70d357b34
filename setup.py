"""A wheel carries the update kernels, compiled for any processor of its machine's kind.

Without a compiler it carries none, and says so; they are then compiled at first use, or replaced by plain torch.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src" / "ebbtide" / "kernels" / "compiler.py"


class WithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        spec = importlib.util.spec_from_file_location("ebbtide_kernels_build", SOURCE)
        assert spec is not None and spec.loader is not None
        build: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = build
        spec.loader.exec_module(build)
        target = Path(self.build_lib) / "ebbtide" / "kernels"
        try:
            build.KERNELS.build_in(target)
        except build.BuildError as error:
            print(f"ebbtide: this wheel carries no compiled kernels: {error}", file=sys.stderr)


class OfThisKind(bdist_wheel):
    """For one kind of machine and any Python: the library is no extension module."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": WithKernels, "bdist_wheel": OfThisKind}, distclass=WithLibrary)
