"""What the process keeps of memory that it has freed; in processes of their own, for a heap's settings stay."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ebbtide.backend import heap

pytestmark = pytest.mark.skipif(heap._glibc() is None, reason="settings of glibc's heap")

MEASURE = """
import psutil, torch
from ebbtide.backend.heap import keep_freed_memory, return_freed_memory
{setting}
rss = lambda: psutil.Process().memory_info().rss
block = torch.ones(1)
before = rss()
block = torch.ones({size} << 18)
above = torch.ones(1 << 10)  # lies behind it in a heap, which ends no more where the block begins
held = rss()
del block
print(held - before, rss() - before)
"""


@pytest.mark.parametrize(
    ("setting", "size", "kept"),
    [
        ("keep_freed_memory()", 24, True),
        ("keep_freed_memory(sparing=True)", 24, True),
        ("keep_freed_memory(sparing=True)", 48, False),
        ("return_freed_memory()", 24, False),
    ],
)
def test_freed_blocks(setting: str, size: int, kept: bool) -> None:
    """Blocks of so many MiB."""
    script = MEASURE.format(setting=setting, size=size)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    held, left = (int(word) / (1 << 20) for word in done.stdout.split())
    assert held > 0.9 * size
    assert (left > 0.9 * size) if kept else (left < 0.1 * size)
