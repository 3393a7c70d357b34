"""How the native kernels come to be, and what happens where they can't."""

import warnings

import pytest

from ebbtide.kernels import FallbackKernels, NativeKernels, build, cpu_kernels


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A source of our own, nothing built, nothing loaded."""
    source = tmp_path / "package" / "adam.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "FOLDER", source.parent)
    monkeypatch.setattr(build, "KERNELS", build.Library("kernels", (source,), build.KERNELS.flags))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load.cache_clear()
    yield source
    build.load.cache_clear()


def test_it_is_built_on_first_use_and_again_when_the_source_changes(fresh):
    assert build.KERNELS.find() is None
    assert build.load().answer() == 42
    first = build.KERNELS.find()
    assert first.parent == fresh.parent
    fresh.write_text('extern "C" int answer() { return 43; }\n')
    build.load.cache_clear()
    assert build.load().answer() == 43
    assert not first.exists()
    assert [path.suffix for path in sorted(fresh.parent.iterdir())] == [".so", ".cpp"]


def test_a_folder_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    usual = build._can_write
    monkeypatch.setattr(build, "_can_write", lambda folder: folder != fresh.parent and usual(folder))
    assert build.load().answer() == 42
    assert build.KERNELS.find().parent == tmp_path / "cache" / "ebbtide"
    assert list(fresh.parent.iterdir()) == [fresh]


def test_without_a_compiler_there_is_one_warning_and_the_fallback(fresh, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler found"):
        kernels = cpu_kernels()
    assert isinstance(kernels, FallbackKernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_kernels()
        with pytest.raises(RuntimeError, match=r"python -m ebbtide\.kernels\.build"):
            cpu_kernels(native=True)


def test_a_build_that_fails_shows_the_compilers_message(fresh, capsys):
    fresh.write_text("this is no C++\n")
    assert build.main() == 1
    assert "error" in capsys.readouterr().err
    with pytest.warns(RuntimeWarning, match="error"):
        assert build.load() is None
    assert list(fresh.parent.iterdir()) == [fresh]


def test_the_library_was_built_for_this_source():
    assert isinstance(cpu_kernels(), NativeKernels)
    assert build.KERNELS.find().name == build.KERNELS.file_name
