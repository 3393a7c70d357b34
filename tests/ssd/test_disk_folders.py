"""Folders of the SSD tier: who owns them, what is refused, what is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ebbtide
from disks import MIB, FaultyIO, memory, stored
from ebbtide.errors import BudgetError, ConfigError, DiskError
from ebbtide.memory.disk.data_files import LOCK
from ebbtide.memory.disk.space import BLOCK, DiskSpace, SystemIO
from ebbtide.runtime.budgets import MARGIN


def test_no_space_is_found_at_once(folder: Path) -> None:
    class Full(SystemIO):
        code = errno.ENOSPC

        def fallocate(self, file: int, size: int) -> None:
            raise OSError(self.code, os.strerror(self.code))

        def free(self, folder: str) -> int:
            return 3 * BLOCK

    with pytest.raises(
        BudgetError, match=r"16384 bytes.*No space left.*short by 4.00 KiB; lower ssd"
    ) as caught:
        DiskSpace([folder], 4 * BLOCK, io=Full())
    assert (caught.value.tier, caught.value.short) == ("ssd", BLOCK)
    assert str(folder) in str(caught.value)
    Full.code = errno.EDQUOT
    with pytest.raises(BudgetError, match="less by the quota"):
        DiskSpace([folder], 4 * BLOCK, io=Full())
    Full.code = errno.EFBIG
    with pytest.raises(DiskError, match="File too large; name a folder on another"):
        DiskSpace([folder], 4 * BLOCK, io=Full())
    assert stored(folder) == []


def test_a_file_has_its_blocks_before_it_is_written(folder: Path) -> None:
    space = DiskSpace([folder], 64 * BLOCK)
    (data,) = folder.glob("*.data")
    assert data.stat().st_blocks * 512 >= 64 * BLOCK == data.stat().st_size
    space.close()


def test_a_file_system_that_gives_no_blocks_ahead_has_them_by_writing(folder: Path) -> None:
    class Without(SystemIO):
        def fallocate(self, file: int, size: int) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    space = DiskSpace([folder], 64 * BLOCK, io=Without())
    (data,) = folder.glob("*.data")
    assert data.stat().st_blocks * 512 >= 64 * BLOCK == data.stat().st_size
    space.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("name", [LOCK, ".data"])
def test_a_folder_that_cannot_be_written_to(folder: Path, code: int, name: str) -> None:
    class Refusing(SystemIO):
        def open(self, path: str, flags: int) -> int:
            if path.endswith(name):
                raise OSError(code, os.strerror(code))
            return super().open(path, flags)

    with pytest.raises(
        ConfigError, match=f"can be written to, found '{folder}' .*{os.strerror(code)}.*change its"
    ):
        DiskSpace([folder], BLOCK, io=Refusing())
    assert stored(folder) == []


def test_wrong_folders(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "other").mkdir()
    for folders, size, message in (
        ([], BLOCK, "expected a folder, found none"),
        ([folder / "missing"], BLOCK, "expected a folder, found nothing at '.*missing'; create it"),
        ([folder / "file"], BLOCK, "expected a folder, found a file at '.*file'"),
        ([folder, folder / "other" / ".."], BLOCK, "is named twice"),
        ([folder, folder / "missing"], BLOCK, "found nothing"),
        ([folder], BLOCK - 1, "ssd.memory: expected at least 4096 bytes, found 4095"),
    ):
        with pytest.raises(ConfigError, match=message):
            DiskSpace(folders, size)
        assert stored(folder) == ["file", "other"]


def test_without_direct_access_there_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    class Late(SystemIO):
        """Takes the flag and refuses the transfers."""

        def pwritev(self, file: int, buffers: Sequence[Any], offset: int) -> int:
            import fcntl

            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().pwritev(file, buffers, offset)

    for io in (FaultyIO(direct=False), Late()):
        with pytest.warns(UserWarning, match=r"no direct access .*page cache") as caught:
            space = DiskSpace([tmp_path / "a", tmp_path / "b"], 3 * MIB, io=io)
        assert len(caught) == 1 and caught[0].filename == __file__
        assert not space.direct
        extent, data, back = space.allocate(2 * MIB), memory(2 * MIB, 0, 1), memory(2 * MIB, 3)
        space.write(extent, [data]).wait()
        space.read(extent, [back]).wait()
        assert torch.equal(data, back)
        space.close()


def run(code: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    text = (
        "import os, signal, sys, time, torch, warnings\nwarnings.simplefilter('ignore')\n"
        f"from ebbtide.memory.disk.space import DiskSpace\nfolder = {str(folder)!r}\n{code}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )


def test_a_folder_in_use_is_refused(folder: Path) -> None:
    space = DiskSpace([folder], MIB)
    with pytest.raises(ConfigError, match=f"'{folder}' is in use by process {os.getpid()}, started 20"):
        DiskSpace([folder], MIB)
    assert len(stored(folder)) == 2
    space.close()
    DiskSpace([folder], MIB).close()


def test_a_lock_that_was_removed_meanwhile_is_none(folder: Path) -> None:
    """Its owner may end between our opening the file and locking it: the name is then somebody else's to take."""

    class Racing(SystemIO):
        raced = False

        def open(self, path: str, flags: int) -> int:
            number = super().open(path, flags)
            if path.endswith(LOCK) and not self.raced:
                self.raced = True
                os.unlink(path)
            return number

    space = DiskSpace([folder], MIB, io=Racing())
    with pytest.raises(ConfigError, match="is in use"):
        DiskSpace([folder], MIB)
    space.close()


def test_another_process_is_refused_and_leaves_nothing(folder: Path) -> None:
    """Normal ends: an exit with the space open, and a space that is let go."""
    holder = run("space = DiskSpace([folder], 1 << 20)\nprint('open', flush=True)\ninput()", folder)
    assert holder.stdout and holder.stdout.readline() == "open\n"
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}, started"):
        DiskSpace([folder], MIB)
    holder.communicate("\n")
    assert holder.returncode == 0 and stored(folder) == []
    space = DiskSpace([folder], MIB)
    del space
    assert stored(folder) == []


def test_what_a_killed_process_left_is_removed(folder: Path) -> None:
    foreign = ["ebbtide-1-0123456789ab.data.bak", "ebbtide-x-0123456789ab.data", "notes.data"]
    for name in foreign:
        (folder / name).write_text("mine")
    (folder / "ebbtide-1-00000000000a.data").mkdir()
    (folder / "ebbtide-1-00000000000b.data").symlink_to(folder / "notes.data")
    before = stored(folder)
    holder = run(
        "space = DiskSpace([folder], 1 << 20)\nheard, said = os.pipe()\n"
        "if os.fork() == 0:\n    os.write(said, b'here')\n    time.sleep(60)\n"
        "os.read(heard, 4)\nprint('open', flush=True)\ntime.sleep(60)",
        folder,
        start_new_session=True,
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "open\n"
        # The child lives on, and must not keep the folder.
        holder.kill()
        holder.wait()
        assert len(stored(folder)) == len(before) + 2
        space = DiskSpace([folder], MIB)
        assert space.removed == 1
        space.close()
        assert stored(folder) == before
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_forked_child_leaves_the_files_alone(folder: Path) -> None:
    holder = run(
        "space = DiskSpace([folder], 1 << 20)\nextent = space.allocate(4096)\n"
        "data = torch.full((4096,), 7, dtype=torch.uint8)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: space.read(extent, [data])\n"
        "    except Exception as error: print(type(error).__name__, flush=True)\n"
        "    space.close()\n    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(len(os.listdir(folder)), flush=True)\n"
        "space.write(extent, [data]).wait()\nspace.read(extent, [data]).wait()\nspace.close()\n"
        "print(len(os.listdir(folder)), flush=True)",
        folder,
    )
    found, _ = holder.communicate()
    assert holder.returncode == 0 and found.split() == ["StateError", "2", "0"]


def test_an_interrupt_while_a_file_is_made_leaves_no_descriptor(folder: Path) -> None:
    class Interrupted(FaultyIO):
        def fallocate(self, file: int, size: int) -> None:
            super().fallocate(file, size)
            raise KeyboardInterrupt

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        DiskSpace([folder], 64 * BLOCK, io=Interrupted())
    assert set(os.listdir("/proc/self/fd")) == before and stored(folder) == []


def test_a_lock_that_is_somebody_elses_by_now_stays(folder: Path) -> None:
    """Somebody removed ours, and another process made its own."""
    space = DiskSpace([folder], BLOCK)
    (folder / LOCK).unlink()
    (folder / LOCK).write_text("process 1")
    space.close()
    assert stored(folder) == [LOCK]


def test_what_a_killed_run_left_is_gone_before_the_room_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folders of its ranks, too, however many they were; what somebody has who lives counts as taken."""
    taken = "rank-1"
    for name in ("", "rank-0", taken, "rank-2"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "ebbtide-1-0123456789ab.data").write_bytes(bytes(4 * MIB))
    (folder / "rank-0" / "notes").write_text("mine")
    owner = DiskSpace([folder / taken], BLOCK)  # removes what was left there, and has a file of its own
    (folder / taken / "ebbtide-1-0123456789ab.data").write_bytes(bytes(4 * MIB))
    disk = 64 * MIB

    def free(path: str) -> SimpleNamespace:
        used = sum(one.stat().st_size for one in Path(path).rglob("*.data"))
        return SimpleNamespace(f_bavail=(disk - used) // BLOCK, f_frsize=BLOCK)

    monkeypatch.setattr(os, "statvfs", free)
    config = {"device": {"kind": "cpu", "memory": "64MiB"}, "ssd": {"folder": str(folder), "memory": "auto"}}
    engine = ebbtide.initialize(torch.nn.Linear(8, 8), config)
    expected = int((disk - 4 * MIB - BLOCK) * (1 - MARGIN))
    assert engine._session.ledger.budgets["ssd"] == expected
    assert engine.stats()["ssd"]["stale_files_removed"] == 3
    assert not (folder / "rank-2").exists() and stored(folder / "rank-0") == ["notes"]
    assert len(stored(folder / taken)) == 3  # with its lock
    engine.close()
    owner.close()
