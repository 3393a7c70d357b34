"""A process that ends, at whatever moment its threads are: it ends well, and what it was asked to keep is there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch import nn

import ebbtide

BEGIN = """
import os, sys, threading, time
import torch
from torch import nn
import ebbtide
from ebbtide.devices import pool
from ebbtide.memory.disk.data_files import SystemIO

def trained(config):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    engine = ebbtide.initialize(model, {"precision": "fp32"} | config)
    for number in range(2):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
    return engine

write = SystemIO.pwritev

def slow(self, *given):
    time.sleep(0.2)
    return write(self, *given)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(script)], capture_output=True, text=True, timeout=100
    )


def test_a_process_ends_well_right_after_its_disk_was_closed(tmp_path: Path) -> None:
    """A thread that still gives memory back when the interpreter is gone would abort the process."""
    done = run(f"""
        give_back = pool._libc.munmap

        class Slow:
            def munmap(self, *given):
                time.sleep(0.3 if threading.current_thread() is not threading.main_thread() else 0)
                return give_back(*given)

        engine = trained({{
            "device": {{"kind": "cpu", "memory": "1MB"}}, "host": {{"memory": 0}},
            "ssd": {{"folder": {str(tmp_path)!r}, "memory": "64MB"}},
        }})
        pool._libc = Slow()
        engine.close()
        """)
    assert done.returncode == 0, done.stderr


def test_what_is_saved_in_the_background_is_there_when_the_process_has_ended(tmp_path: Path) -> None:
    done = run(f"""
        engine = trained({{}})
        SystemIO.pwritev = slow
        engine.save({str(tmp_path)!r}, background=True)
        assert not os.path.exists({str(tmp_path / "latest")!r}), "not in the background"
        print(engine.weights_sha256())
        """)
    assert done.returncode == 0, done.stderr
    engine = ebbtide.initialize(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), {"precision": "fp32"})
    engine.load(tmp_path)
    assert engine.weights_sha256() == done.stdout.split()[-1]
    engine.close()


@pytest.mark.parametrize("end", ["", "del engine", "raise SystemExit(3)"])
def test_what_cannot_be_saved_in_the_background_is_said_when_the_process_ends(
    tmp_path: Path, end: str
) -> None:
    done = run(f"""
        engine = trained({{}})

        def full(self, *given):
            if threading.current_thread().name != "ebbtide-save":
                return write(self, *given)
            time.sleep(0.2)
            raise OSError(28, "No space left on device")

        SystemIO.pwritev = full
        engine.save({str(tmp_path)!r}, background=True)
        {end}
        """)
    assert done.returncode == (3 if "3" in end else 0), done.stderr
    assert "step 2 could not be written: No space left on device" in done.stderr


def test_a_child_forked_while_a_checkpoint_is_written_ends_by_itself(tmp_path: Path) -> None:
    """It has none of the threads: it would wait for ever."""
    done = run(f"""
        engine = trained({{}})
        SystemIO.pwritev = slow
        engine.save({str(tmp_path)!r}, background=True)
        if not (child := os.fork()):
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest").exists()
