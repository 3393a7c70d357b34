"""Processes that a benchmark starts end with it, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

SCRIPT = """
import os, sys, time
from pathlib import Path
from ebbtide.bench.steps import in_process

def start(place): Path(place).write_text(str(os.getpid()))
def end(): pass
def work(): time.sleep(600)

if __name__ == "__main__":
    with in_process(start, end, sys.argv[1]) as pool:
        pool.submit(work).result()
"""


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script, place = tmp_path / "script.py", tmp_path / "child"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script), str(place)])
    try:
        until = time.monotonic() + 120
        while not (place.exists() and place.read_text()):
            assert time.monotonic() < until and parent.poll() is None
            time.sleep(0.05)
        child = int(place.read_text())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        parent.kill()
