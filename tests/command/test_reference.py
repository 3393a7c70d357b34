"""Each setting and each method has its sentence in the reference, and each link in the documents leads somewhere."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import reference_tables  # noqa: E402

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("table", reference_tables.TABLES, ids=lambda table: table.__name__)
def test_each_setting_has_its_sentence(table):
    said = reference_tables.sentences(table)
    for field in fields(table):
        if not (isinstance(field.default_factory, type) and is_dataclass(field.default_factory)):
            assert said.get(field.name, "").endswith("."), f"{table.__name__}.{field.name} has no sentence"


def test_the_tables_are_those_of_the_config():
    tables = {field.default_factory for field in fields(reference_tables.config.Config)}
    assert {*reference_tables.TABLES} == {one for one in tables if is_dataclass(one)} | {
        reference_tables.config.Config
    }


def test_the_settings_page_says_what_is_allowed():
    page = reference_tables.on_page_markdown((ROOT / "docs" / "settings.md").read_text())
    assert "| `precision` | one of 'bf16', 'fp16', 'fp32' | `bf16` |" in page
    assert "## `[device]`" in page
    assert "<!--" not in page


def test_each_method_has_its_sentence():
    for shown, text in reference_tables.methods():
        assert text.endswith((".", ":")), f"{shown} has no sentence: {text!r}"
    page = reference_tables.on_page_markdown((ROOT / "docs" / "engine.md").read_text())
    assert "`engine.step()`" in page
    assert "<!--" not in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name}: {link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target.read_text()), f"{document.name}: {link} has no such heading"


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


WALK = re.findall(
    r"^\| \d+ \| `([\w/.]+)`[^|]* \| (.+?) \|", (ROOT / "docs" / "walkthrough.md").read_text(), re.M
)


@pytest.mark.parametrize(
    ("file", "functions"), WALK, ids=[f"{file}-{place}" for place, (file, _) in enumerate(WALK)]
)
def test_the_walkthrough_names_what_is_there(file, functions):
    tree = ast.parse((ROOT / "src" / "ebbtide" / file).read_text())
    names = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for dotted in re.findall(r"`([\w.]+)`", functions):
        owner, _, method = dotted.partition(".")
        assert owner in names, f"{file} has no {owner}"
        inside = {node.name for node in names[owner].body if isinstance(node, ast.FunctionDef)}
        assert not method or method in inside, f"{file}: {owner} has no {method}"


def test_files_of_the_glossary_exist():
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs" / "glossary.md").read_text()):
        assert (ROOT / "src" / "ebbtide" / path.removeprefix("src/ebbtide/")).exists(), path


def test_names_in_the_architecture_exist():
    """Modules by dotted name or path, and names of the code in backticks."""
    sources = {
        path.relative_to(ROOT / "src" / "ebbtide"): path.read_text()
        for path in (ROOT / "src").rglob("*.[pc]*")
        if path.suffix in (".py", ".cpp")
    }
    code = "\n".join(sources.values())
    for name in re.findall(r"`([\w./]+)`", (ROOT / "docs" / "architecture.md").read_text()):
        if name.endswith((".py", ".cpp")):
            assert any(path.match(name) for path in sources), name
        elif not (ROOT / "src" / "ebbtide" / name.replace(".", "/")).with_suffix(".py").exists():
            last = name.rstrip("/").rpartition("/")[2].rpartition(".")[2]
            assert re.search(rf"\b{last}\b", code) or any(last in path.parts for path in sources), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(document):
    """Those of files of the project, from its root or from src/ebbtide."""
    for path in re.findall(
        r"`((?:[\w-]+/)+[\w-]+\.(?:py|cpp|toml)|(?:src|docs|examples)/[\w/.-]*|tests/\w+/)`",
        document.read_text(),
    ):
        assert any((place / path).exists() for place in (ROOT, ROOT / "src" / "ebbtide")), (
            f"{document.name}: no {path}"
        )
