"""Runs in small, for their pages; and a browser to look at them in."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ebbtide
import zoo
from ebbtide.report.build_page import figures_of, write_page
from ebbtide.report.run_files import read_run
from harness import batch_of, config_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BUDGETS = {"device": {"memory": 2_500_000}, "host": {"memory": 6_000_000}}


def small_run(folder: Path, steps: int = 7, **settings: Any) -> Path:
    """gpt2 of the zoo under a budget, with an evaluation after the fourth step."""
    config = config_of(precision="fp32", **{**BUDGETS, **settings})
    engine = ebbtide.initialize(zoo.build("gpt2"), config)
    try:
        recording = engine.record(folder)
        for number in range(steps):
            engine.backward(engine(**batch_of("gpt2", number, torch.float32, "cpu")).loss)
            engine.step()
            if number == 3:
                recording.mark("evaluated", valid_loss=1.5)
    finally:
        engine.close()
    return folder


def page_of(folder: Path) -> Path:
    path = folder / "report.html"
    write_page(figures_of(read_run(folder)), path)
    return path


def data_of(page: Path) -> dict[str, Any]:
    """What the page's figures are drawn from."""
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Of steps, as the metrics have them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def last_full_step(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(max((folder / "steps").iterdir()).read_bytes()))
    return found


def browser_path() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@contextmanager
def browsing() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        yield browser
        browser.close()
