"""How the native kernels come to be, and what happens where they can't."""

import sys
import types
import warnings

import pytest

from ebbtide.errors import EbbtideWarning
from ebbtide.kernels import FallbackKernels, NativeKernels, compiler, cpu_kernels, gpu_kernels


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A source of our own, nothing built, nothing loaded."""
    source = tmp_path / "package" / "native.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(compiler, "FOLDER", source.parent)
    monkeypatch.setattr(compiler, "KERNELS", compiler.Library("kernels", (source,), compiler.KERNELS.flags))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler.load.cache_clear()
    yield source
    compiler.load.cache_clear()


def test_it_is_built_on_first_use_and_again_when_the_source_changes(fresh):
    assert compiler.KERNELS.find() is None
    assert compiler.load().answer() == 42
    first = compiler.KERNELS.find()
    assert first.parent == fresh.parent
    fresh.write_text('extern "C" int answer() { return 43; }\n')
    compiler.load.cache_clear()
    assert compiler.load().answer() == 43
    assert not first.exists()
    assert [path.suffix for path in sorted(fresh.parent.iterdir())] == [".so", ".cpp"]


def test_a_folder_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    usual = compiler._can_write
    monkeypatch.setattr(compiler, "_can_write", lambda folder: folder != fresh.parent and usual(folder))
    assert compiler.load().answer() == 42
    assert compiler.KERNELS.find().parent == tmp_path / "cache" / "ebbtide"
    assert list(fresh.parent.iterdir()) == [fresh]


def test_without_a_compiler_there_is_one_warning_and_the_fallback(fresh, monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with pytest.warns(EbbtideWarning, match=r"no C\+\+ compiler found"):
        kernels = cpu_kernels()
    assert isinstance(kernels, FallbackKernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_kernels()
        with pytest.raises(RuntimeError, match=r"python -m ebbtide\.kernels\.compiler"):
            cpu_kernels(native=True)


def test_where_triton_cannot_compile_there_is_one_warning_and_the_fallback(monkeypatch):
    """It raised within backward, when the first gradient came."""

    class Broken(FallbackKernels):
        def sum_of_squares(self, flat):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setitem(sys.modules, "ebbtide.kernels.gpu", types.SimpleNamespace(TritonKernels=Broken))
    with pytest.warns(EbbtideWarning, match="Triton cannot compile here .Failed to find C compiler"):
        kernels = gpu_kernels("cpu")
    assert type(kernels) is FallbackKernels


def test_a_build_that_fails_shows_the_compilers_message(fresh, capsys):
    fresh.write_text("this is no C++\n")
    assert compiler.main() == 1
    assert "error" in capsys.readouterr().err
    with pytest.warns(EbbtideWarning, match="error"):
        assert compiler.load() is None
    assert list(fresh.parent.iterdir()) == [fresh]


def test_the_library_was_built_for_this_source():
    assert isinstance(cpu_kernels(), NativeKernels)
    assert compiler.KERNELS.find().name == compiler.KERNELS.file_name
