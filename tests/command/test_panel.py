"""The live panel fits 80 columns, says what waits for what, and gives way to plain lines where nobody looks."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ebbtide.cli import doing as module
from ebbtide.cli.doing import doing
from ebbtide.cli.loop import Step
from ebbtide.cli.panel import PanelView, bar

GIB = 1 << 30
SAID_OF_TERMINALS = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
STATS: dict[str, Any] = {
    "held_bytes": {"device": 3 * GIB, "host": 900 * GIB, "ssd": 0},
    "peak_bytes": {"device": 79 * GIB, "host": 1000 * GIB, "ssd": 0},
    "budget_bytes": {"device": 80 * GIB, "host": 1024 * GIB, "ssd": 0},
}


def rendered(view: PanelView) -> list[str]:
    console = Console(file=io.StringIO(), width=80, no_color=True)
    console.print(view.render())
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def test_it_fits_eighty_columns_and_says_what_waits() -> None:
    view = PanelView(1_000_000)
    assert rendered(view) == ["first step: the pass is imagined, planned and traced"]
    causes = {"computing": 6.0, "ssd_read": 3.0, "update_wait": 1.0, "host_to_device": 0.0}
    view.take(Step(123_456, 2.34567, 1.0, 1e-3, 1.0, False), 123_456.0, 98_765.0, STATS, causes)
    lines = rendered(view)
    assert all(len(line.rstrip()) <= 80 for line in lines) and len(lines) == 4
    assert lines[0].startswith("step 123,456/1,000,000") and "loss 2.3457" in lines[0]
    assert lines[1].startswith("device █") and "3.00 GiB of 80.0 GiB, at most 79.0 GiB" in lines[1]
    assert lines[3].strip() == "waits for SSD reads 30.0 %, updates 10.0 %"


def test_a_tier_without_a_budget_has_no_bar_and_no_waits_are_said() -> None:
    view = PanelView(10)
    view.take(Step(1, 1.0, 1.0, 1e-3, None, False), 1.0, 1.0, STATS, {"computing": 1.0})
    lines = rendered(view)
    assert (
        not any(line.strip().startswith("ssd") for line in lines) and lines[-1].strip() == "waits for nothing"
    )


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.01, 0.5, 0.999, 1.0, 7.0])
def test_a_bar_has_its_width(share: float) -> None:
    assert len(bar(share, 12)) == 12 and bar(0.5, 12) == "█" * 6 + "·" * 6


def on_a_terminal(tmp_path: Path, **variables: str) -> str:
    """What the command writes to a terminal."""
    try:
        leader, follower = pty.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo terminals here: {error}")
    inherited = {key: value for key, value in os.environ.items() if key not in SAID_OF_TERMINALS}
    flags = ["--model", "gpt2-tiny", "--steps", "3", "--seq", "16", "--batch", "1", "--precision", "fp32"]
    flags += ["--out", str(tmp_path / "run"), "--save-every", "1", "--eval-every", "2", "--verbose"]
    run = subprocess.Popen(
        [sys.executable, "-m", "ebbtide", "train", *flags],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**inherited, "COLUMNS": "80", "TERM": "xterm", **variables},
        cwd=tmp_path,
    )
    os.close(follower)
    said = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(leader)
    assert run.wait(timeout=300) == 0, said
    return said.decode()


def test_a_terminal_has_the_panel(tmp_path: Path) -> None:
    """Also beside checkpoints and evaluations, which say their lines above it."""
    said = on_a_terminal(tmp_path)
    assert "saved step 1 in " in said and "evaluated after step 2" in said and "everything stays" in said
    assert "\x1b[" in said and "step 3/3" in said and "device " in said and "waits for " in said


def test_no_color_has_plain_lines(tmp_path: Path) -> None:
    said = on_a_terminal(tmp_path, NO_COLOR="1")
    assert "\x1b[" not in said and "step 3/3" in said and "█" not in said


def test_what_takes_long_says_so_where_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LONG", 0.05)
    with doing("taking its time"):
        time.sleep(0.5)
    with doing("at once"):
        pass
    with doing("for another rank", silent=True):
        time.sleep(0.2)
    assert capfd.readouterr().err == "ebbtide: taking its time ...\n"
