"""Each recipe of docs/recipes.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
RECIPES = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))


def test_there_are_some() -> None:
    assert len(RECIPES) == TEXT.count("```python") >= 4


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(RECIPES[title], f"docs/recipes.md: {title}", "exec"), {"__name__": "recipe"})
