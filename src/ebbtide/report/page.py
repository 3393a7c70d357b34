"""The page: a run's figures, and the script that draws them, in one file that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ebbtide.report.plain_files import finite


def page(figures: Mapping[str, Any]) -> str:
    assets = files("ebbtide.report") / "assets"
    parts = {
        "title": html.escape(str(figures["title"])),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "data": as_text(figures),
        "script": (assets / "page.js").read_text(encoding="utf-8"),
    }
    pieces = (assets / "page.html").read_text(encoding="utf-8").split("{{")
    made = pieces[:1]
    for piece in pieces[1:]:
        name, _, after = piece.partition("}}")
        made += [parts[name], after]
    return "".join(made)


def as_text(figures: Mapping[str, Any]) -> str:
    """JSON within a script's element: nothing in it can end the element."""
    text = json.dumps(finite(figures), separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
