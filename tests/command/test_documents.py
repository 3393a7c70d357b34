"""What the documents tell a reader to type can be typed."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ebbtide.cli.app import app, run
from test_reference import DOCUMENTS, ROOT

MANY = re.compile("--compare|--find-max")
MACHINES = ROOT / "src" / "ebbtide" / "forecasting" / "simulation" / "machines"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _fences(document: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(document.read_text()) if found == language]


COMMANDS = [
    pytest.param(line.partition("#")[0], id=f"{document.name}:{line[:60]}")
    for document in DOCUMENTS
    for text in _fences(document, "sh")
    for line in text.replace("\\\n", " ").replace(" && ", "\n").splitlines()
    if re.search(r"\bebbtide (train|plan|doctor|bench|demo)\b", line)
]


def test_there_are_some():
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_the_flags_that_it_is_given(line):
    words = _words(line)
    command = get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{command.name} has no {word}"


def _words(line: str) -> list[str]:
    words = shlex.split(line)
    return words[[word.endswith("ebbtide") for word in words].index(True) + 1 :]


def _each(command: str) -> list[Any]:
    """Lines that begin so. Those that try many plans take half a minute."""
    lines = sorted({case.values[0].strip() for case in COMMANDS if command in case.values[0]})
    return [pytest.param(line, marks=[pytest.mark.heavy] * bool(MANY.search(line))) for line in lines]


@pytest.mark.parametrize("line", _each("ebbtide plan"))
def test_a_plan_is_made(line, tmp_path, monkeypatch):
    """Machine files of the reader's own are like one of ours."""
    monkeypatch.chdir(tmp_path)
    for name in ("here.toml", "yard.toml"):
        shutil.copy(MACHINES / "v100-node.toml", name)
    assert run(_words(line)) == 0


@pytest.mark.parametrize("line", _each("ebbtide train"))
def test_a_run_trains(line, tmp_path, monkeypatch):
    """On a small model, for two steps."""
    monkeypatch.chdir(tmp_path)
    small = ["--model", "gpt2-tiny", "--steps", "2", "--seq", "32", "--batch", "2"]
    assert run([*_words(line), *small]) == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_parses(document):
    for text in _fences(document, "python"):
        ast.parse(text)


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "docs" / "index.md"], ids=lambda path: path.name
)
def test_the_first_loop_runs(document):
    import zoo

    [text] = [text for text in _fences(document, "python") if "loader" in text]
    names = {"model": zoo.build("gpt2"), "loader": [zoo.ZOO["gpt2"].batch(step) for step in range(2)]}
    exec(compile(text, document.name, "exec"), names)
    assert names["engine"].steps == 2
    names["engine"].close()


def test_the_first_trainer_trains(tmp_path):
    import torch
    import transformers

    import zoo

    [text] = [text for text in _fences(ROOT / "README.md", "python") if "Trainer" in text]
    rows = [{key: value[0] for key, value in zoo.ZOO["gpt2"].batch(step).items()} for step in range(4)]
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available()
    )
    names = {"model": zoo.build("gpt2"), "args": args, "data": rows}
    exec(compile(text, "README.md", "exec"), names)
    assert names["trainer"].train().global_step == 2
