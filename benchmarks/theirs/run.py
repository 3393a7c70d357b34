"""The frameworks' own tests, with ebbtide put in where their users would put it.

    python benchmarks/theirs/run.py lightning FOLDER --out stock.json          # what passes as it is
    python benchmarks/theirs/run.py lightning FOLDER --ours --out ours.json    # with ebbtide put in
    python benchmarks/theirs/run.py compare stock.json ours.json

FOLDER is a checkout of the framework's repository, of the version that is installed; Accelerate's tests are in its
package, and take none. `--shard 2/4` runs a quarter. The optimizer of their small models is AdamW in both runs: the
engine had no SGD when the results were taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from put_in import PREPARE, PUT_IN, close, touched

SELECTED = {
    "lightning": ["tests/tests_pytorch/strategies", "tests/tests_pytorch/plugins/precision"],
    "lightning-loops": [
        f"tests/tests_pytorch/{name}" for name in ("loops", "checkpointing", "models/test_hooks.py", "core")
    ],
    "transformers": ["tests/trainer"],
    "accelerate": [],
}
WIDER = {"lightning-loops": "lightning"}
"""Selections beyond what is promised, of the same framework."""


class Outcomes:
    """What became of each test, and whether ebbtide trained in it. A line a minute says how far it is."""

    def __init__(self, shard: tuple[int, int]) -> None:
        self._shard = shard
        self.found: dict[str, dict[str, Any]] = {}
        self._said = time.monotonic()
        self._count = 0

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "flaky: as their own configuration has it")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        number, of = self._shard
        items[:] = items[number - 1 :: of]
        self._count = len(items)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        touched.clear()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield
        close()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        fact = self.found.setdefault(report.nodeid, {"outcome": "passed", "ours": False})
        if report.outcome != "passed":
            fact["outcome"] = report.outcome
            if report.outcome == "failed":
                fact["why"] = str(report.longrepr).strip().splitlines()[-1][:300]
        fact["ours"] |= bool(touched)
        if time.monotonic() - self._said > 60:
            self._said = time.monotonic()
            print(f"\n{len(self.found)} of {self._count} tests", flush=True)


def run_pytest(framework: str, folder: Path, shard: tuple[int, int]) -> dict[str, Any]:
    outcomes = Outcomes(shard)
    root = folder / "tests" if WIDER.get(framework, framework) == "lightning" else folder
    sys.path.insert(0, str(root))
    paths = [str(folder / name) for name in SELECTED[framework]]
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--continue-on-collection-errors",
        "--tb=line",
        f"--rootdir={root}",
    ]
    pytest.main([*arguments, *paths], plugins=[outcomes])
    return outcomes.found


def run_functions(functions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, function in functions.items():
        touched.clear()
        try:
            function()
            found[name] = {"outcome": "passed", "ours": bool(touched)}
        except (Exception, SystemExit) as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            why = f"{type(error).__name__}: {lines[0]}"[:300]
            found[name] = {"outcome": "failed", "ours": bool(touched), "why": why}
        close()
        print(name, found[name], flush=True)
    return found


def compare(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    passes = {name for name, fact in stock.items() if fact["outcome"] == "passed"}
    still = {name for name in passes if ours.get(name, {}).get("outcome") == "passed"}
    trained = {name for name in passes if ours.get(name, {}).get("ours")}
    for name in sorted(passes - still):
        print(name, ours.get(name, {}).get("why", "did not run"))
    print(f"{len(passes)} pass as they are; with ebbtide put in {len(still)} of these, ", end="")
    print(f"{len(trained & still)} of the {len(trained)} in which it trains")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*SELECTED, "compare"])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "compare":
        compare(*(json.loads(path.read_text()) for path in given.paths))
        return
    framework = WIDER.get(given.what, given.what)
    number, of = map(int, given.shard.split("/"))
    functions = PREPARE[framework]()
    if given.ours:
        PUT_IN[framework]()
    if functions:
        found = run_functions(functions)
    elif not given.paths:
        parser.error(f"{given.what}: name the folder of its repository")
    else:
        found = run_pytest(given.what, given.paths[0].resolve(), (number, of))
    outcomes = [fact["outcome"] for fact in found.values()]
    print({kind: outcomes.count(kind) for kind in sorted(set(outcomes))})
    if given.out:
        given.out.write_text(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
