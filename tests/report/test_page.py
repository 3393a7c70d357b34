"""The page in a browser: nothing fails, its numbers are the run's, and the keyboard reaches all of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.app import run as command
from ebbtide.report.causes import CAUSES, LANES
from pages import browser_path, browsing, last_full_step, lines_of, page_of, small_run

pytestmark = [
    pytest.mark.skipif(browser_path() is None, reason="no Chromium here: the page is tried in CI"),
    pytest.mark.xdist_group("browser"),
]
SHOTS = Path(os.environ.get("EBBTIDE_SHOTS", "build/screenshots"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_run(tmp_path_factory.mktemp("run"))
    page_of(folder)
    return folder


class Opened:
    """A page, with all that went wrong on it and all that it asked the network for."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme=scheme)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]")

    def table(self, holder: str) -> list[list[str]]:
        """The cells of the first table within."""
        rows = self.page.locator(f"{holder} table").first.locator("tbody tr")
        return [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in rows.all()]

    def said(self) -> str:
        text: str = self.page.locator("#live").text_content()
        return text


@pytest.fixture
def opened(browser: Any, run: Path) -> Iterator[Opened]:
    found = Opened(browser, run / "report.html")
    yield found
    assert not found.errors
    found.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_in_both_schemes_without_an_error_or_a_network(browser: Any, run: Path, scheme: str) -> None:
    found = Opened(browser, run / "report.html", scheme)
    assert not found.errors and found.asked == [(run / "report.html").as_uri()]
    ground = "getComputedStyle(document.body).backgroundColor"
    before = found.page.evaluate(ground)
    assert (before == "rgb(255, 255, 255)") == (scheme == "light")
    SHOTS.mkdir(parents=True, exist_ok=True)
    found.page.screenshot(path=SHOTS / f"page-{scheme}.png", full_page=True)
    for name in ("verdict", "tide", "schedule", "plan", "curves", "tables"):
        found.page.locator(f"#{name}").screenshot(path=SHOTS / f"{name}-{scheme}.png")
    found.page.click("#theme")
    assert found.page.evaluate(ground) != before and not found.errors
    found.page.close()


def test_the_tables_have_the_numbers_of_the_step(opened: Opened, run: Path) -> None:
    step = last_full_step(run)
    line = next(line for line in lines_of(run) if line["step"] == step["step"])
    data = json.loads(opened.page.locator("#data").inner_text())
    shown = data["recorded"][-1]
    assert shown["bytes"] == line["bytes"] and shown["seconds"] == line["seconds"]
    spent = {cause: seconds for cause, seconds in shown["causes"].items() if cause != "unexplained"}
    assert spent == line["causes"]
    assert shown["causes"]["unexplained"] == pytest.approx(line["seconds"] - sum(line["causes"].values()))
    names = [row[0] for row in opened.table("#causes")]
    assert names == [CAUSES[cause].name for cause in shown["causes"]]
    as_shown = opened.page.evaluate("(step) => Object.values(step.causes).map(seconds)", shown)
    assert [row[1] for row in opened.table("#causes")] == as_shown
    lanes = {row[0]: row for row in opened.table("#lanes")}
    for link, count in line["bytes"].items():
        moves = [row for row in step["moves"] if row[0] == link]
        if moves:
            assert int(lanes[LANES[link]][1]) == len(moves)
            assert lanes[LANES[link]][2] == opened.page.evaluate("bytes", count)
    planned = {row[0]: row for row in opened.table("#planned")}["bytes moved between tiers"]
    moved = sum(count for link, count in line["bytes"].items() if link != "wire")
    assert planned[1:3] == [opened.page.evaluate("bytes", n) for n in (step["plan"]["traffic"], moved)]


def test_each_lane_has_a_bar_for_each_event(opened: Opened, run: Path) -> None:
    """Close enough that none falls into another's pixel, the bars in view are the events in view."""
    step = last_full_step(run)
    page = opened.page
    for share in (0.1, 0.5, 0.8):
        first, last = share * step["seconds"], (share + 0.02) * step["seconds"]
        page.evaluate("([from, to]) => { state.from = from; state.to = to; redraw(); }", [first, last])
        for link in step["bytes"]:
            rows = [row for row in step["moves"] if row[0] == link]
            inside = [row for row in rows if row[5] < last and row[6] > first]
            drawn = page.locator(f'#schedule-figure rect.bar[data-lane="{link}"]').count()
            assert drawn <= len(inside) + 1 and (drawn > 0) == bool(inside)
    page.evaluate("everything()")


def test_hover_and_click_say_what_a_moment_is(opened: Opened, run: Path) -> None:
    step = last_full_step(run)
    page = opened.page
    place = len(step["moments"]) // 2
    begin, phase, _, position = step["moments"][place]
    left = page.evaluate("(time) => x(time + 1e-7)", begin)
    box = page.locator("#tide-figure").bounding_box()
    page.locator("#tide-figure").hover(position={"x": left * box["width"] / 1140, "y": 30})
    tip = page.locator("#tip").inner_text()
    assert "moment " in tip and "of the plan" in tip and "device: " in tip
    page.locator("#tide-figure").focus()
    page.keyboard.press("Home")
    for _ in range(place):
        page.keyboard.press("ArrowRight")
    assert (
        opened.said().startswith(f"moment {place} ({position} of the plan)")
        and f": {phase} of " in opened.said()
    )
    level = [row for row in step["levels"] if row[1] == "device" and row[0] <= begin][-1]
    held = sum(level[2].values()) + level[3]
    following = [row[0] for row in step["levels"] if row[1] == "device" and row[0] > begin]
    after = step["moments"][place + 1][0]
    if not following or following[0] > (begin + after) / 2:
        assert f"device: {page.evaluate('bytes', held)} (" in opened.said()
    page.keyboard.press("Enter")
    assert page.locator("#moment").text_content() == opened.said()
    page.keyboard.press("Escape")
    assert not page.locator("#moment").is_visible()


def test_a_chunk_has_its_way_on_all_lanes(opened: Opened, run: Path) -> None:
    step = last_full_step(run)
    chunk = next(row[1] for row in step["moves"] if row[1] is not None)
    events = [row for row in step["moves"] if row[1] == chunk] + [
        row for row in step["updates"] if row[0] == chunk
    ]
    page = opened.page
    page.fill("#chunk", str(chunk))
    page.keyboard.press("Enter")
    rows = opened.table("#way")
    beside = [row for row in rows if row[1] != LANES["thread"]]
    assert len(beside) == len(events)
    moved = sorted(page.evaluate("bytes", row[3]) for row in step["moves"] if row[1] == chunk)
    assert sorted(row[3] for row in beside if row[3]) == moved
    page.get_by_role("button", name="no chunk").click()
    assert not page.locator("#way table").count()


def test_the_keyboard_alone_reaches_everything(opened: Opened) -> None:
    page = opened.page
    reached: set[str] = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("(one => one.id || one.dataset.curve || one.textContent)(document.activeElement)")
        )
    wanted = {
        "theme",
        "step",
        "chunk",
        "tide-figure",
        "schedule-figure",
        "loss",
        "closer",
        "whole step",
        "no chunk",
    }
    assert wanted <= reached, wanted - reached
    page.locator("#schedule-figure").focus()
    lanes = page.evaluate("figures.laneNames")  # those that this step has
    for _ in lanes[1:]:
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")  # of no meaning here
    page.keyboard.press("ArrowLeft")
    assert opened.said().startswith(f"{LANES[lanes[-1]]}, 1 of ") and lanes[-1] == "device_to_host"
    page.keyboard.press("Enter")
    assert page.locator("#way table").count() == 1
    whole = page.evaluate("state.to - state.from")
    page.keyboard.press("+")
    assert page.evaluate("state.to - state.from") == pytest.approx(whole / 2)
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert page.evaluate("state.to - state.from") == pytest.approx(whole)


def test_a_curve_says_each_step(opened: Opened, run: Path) -> None:
    page = opened.page
    page.locator('[data-curve="loss"]').focus()
    page.keyboard.press("Home")
    for line in lines_of(run):
        mark = "; evaluated" if line["step"] == 4 else ""
        said = opened.said()
        assert (
            said.startswith(f"step {line['step']}: loss {page.evaluate('plain', line['loss'])}")
            and mark in said
        )
        page.keyboard.press("ArrowRight")


def test_names_are_text_whatever_is_in_them(browser: Any, run: Path, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='evil'\"><!--"
    for path in run.iterdir():
        if path.is_file() and path.name != "report.html":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "steps").symlink_to(run / "steps")
    facts = json.loads((tmp_path / "run.json").read_text())
    facts["model"] |= {"class": evil, "tensors": [evil] * len(facts["model"]["tensors"])}
    facts["model"]["units"] = [evil] * len(facts["model"]["units"])
    facts["settings"][0]["why"] = facts["machine"]["processor"] = evil
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": evil, "step": 2, "note": evil}) + "\n")
    found = Opened(browser, page_of(tmp_path))
    found.page.locator("#tide-figure").focus()
    found.page.keyboard.press("Home")
    assert evil in found.said() and evil in found.page.title() and not found.errors
    assert not found.page.locator("img").count() and len(found.asked) == 1
    found.page.close()


def test_a_run_without_a_recorded_step_has_its_curves(browser: Any, tmp_path: Path) -> None:
    small_run(tmp_path, steps=1)
    found = Opened(browser, page_of(tmp_path))
    assert not found.errors and found.page.locator('[data-curve="loss"]').count() == 1
    assert "no step was recorded in full" in found.page.locator("#verdict").inner_text()
    found.page.close()


def test_a_forecast_opens_too(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    flags = ["plan", "--model", "gpt:layers=4,hidden=256,heads=4", "--machine", "v100-node", "--gpus", "2"]
    assert command([*flags, "--report", str(page)]) == 0
    found = Opened(browser, page)
    found.page.locator("#tide-figure").focus()
    found.page.keyboard.press("Home")
    assert (
        found.said().startswith("moment 0 (0 of the plan)")
        and "device: " in found.said()
        and not found.errors
    )
    assert "nothing was run" in found.page.locator("#verdict").inner_text()
    found.page.close()
