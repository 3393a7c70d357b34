"""What is to be measured on a card, in order; each script stores what it has as it goes.

    python benchmarks/gpu/run_queue.py list                   # what there is, and when it was run
    python benchmarks/gpu/run_queue.py next                   # runs the first that has no whole result, else the oldest
    python benchmarks/gpu/run_queue.py run resident_8b --small # one of them; small: on the CPU, to see that it runs

`make gpu-queue` and `make gpu-next` are the first two. No script takes longer than four minutes; none installs anything.
Results of small runs go to the folder of `--out`, never among the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "peers"), str(HERE.parents[1] / "src")]

from results import RESULTS, Store, source_of  # noqa: E402

ORDER = (
    "resident_8b",
    "budget_8b",
    "peers_8b",
    "budget_14b",
    "budget_18b",
    "retention_8b",
    "more_peers_8b",
    "two_ranks",
)
"""The three that count most, first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("list", "next", "run"))
    parser.add_argument("name", nargs="?", choices=ORDER)
    parser.add_argument("--small", action="store_true", help="tiny models, on whatever device there is")
    parser.add_argument("--out", type=Path, help="the folder of results; with --small it must be named")
    parser.add_argument("--commit", default="", help="of what is measured, where git does not know it")
    options = parser.parse_args()
    if options.what == "run" and options.name is None:
        parser.error(f"run: expected one of {', '.join(ORDER)}")
    if options.small and options.out is None:
        parser.error("--small: name a folder with --out; such figures are not results")
    if options.what == "list":
        return show(options.out or RESULTS)
    name = options.name if options.what == "run" else following(options.out or RESULTS)
    return run(name, options)


def run(name: str, options: argparse.Namespace) -> int:
    import torch

    if not options.small and not torch.cuda.is_available():
        print(
            "gpu-queue: torch sees no CUDA device on this machine; --small tries a script without one",
            file=sys.stderr,
        )
        return 2
    script = import_module(name)
    store = Store(options.out or RESULTS, name, script.QUESTION, options.commit, options.small)
    print(f"{name}: {script.QUESTION}", flush=True)
    script.run(store, options.small)
    store.close()
    return 1 if store.failed else 0


def known(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def following(folder: Path) -> str:
    found = {name: known(folder, name) for name in ORDER}
    for name, result in found.items():
        if result is None or not result["whole"]:
            return name
    return min(ORDER, key=lambda name: str(found[name]["date"]))  # type: ignore[index]


def show(folder: Path) -> int:
    here = source_of()
    print(f"{'script':14} {'run':10} {'commit':13} {'of this source':15} parts")
    for name in ORDER:
        result = known(folder, name)
        if result is None:
            print(f"{name:14} {'never':10}")
            continue
        same = "yes" if result["source"] == here else "no"
        failed = [part for part, value in result["parts"].items() if "error" in value]
        parts = f"{len(result['parts'])}" + (f", failed: {', '.join(failed)}" if failed else "")
        parts += "" if result["whole"] else ", cut short"
        print(f"{name:14} {result['date']:10} {result['commit'] or '?':13} {same:15} {parts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
