"""Runs a benchmark of the `ebbtide` command and keeps what it finds in benchmarks/results.

    python benchmarks/keep_result.py loss-xeon bench loss --precision fp32

writes benchmarks/results/loss-xeon.json: date, command, commit, machine, versions, and the command's own JSON. Whoever
wants the page of figures to show it runs benchmarks/performance.py then. A result of that name is replaced, but only by
a whole one: where the command fails, the file stays as it is. Exits with the command's status.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from provenance import RESULTS, ROOT, provenance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the file, without .json: what was measured and on what")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="ebbtide's, such as: bench loss --quick")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the file goes; before the name")
    options = parser.parse_args()
    if Path(options.name).name != options.name or options.name.startswith("-"):
        parser.error(f"name: expected a file's name such as loss-xeon, found {options.name!r}")
    if options.command[:1] != ["bench"]:
        parser.error(f"command: expected bench and its options, found {shlex.join(options.command)!r}")
    arguments = options.command if "--json" in options.command else [*options.command, "--json"]
    # What the machine and the checkout were when it began.
    whence = provenance(shlex.join(["ebbtide", *arguments])) | {"load_before": os.getloadavg()[0]}
    found = measured(arguments)
    if isinstance(found, int):
        print(f"keep_result: ebbtide ended with {found}; nothing was kept", file=sys.stderr)
        return found
    file = options.folder / f"{options.name}.json"
    written = file.with_suffix(".json.new")
    written.write_text(json.dumps(whence | found, indent=1) + "\n")
    written.replace(file)
    print(f"keep_result: {file}", file=sys.stderr)
    return 0


def measured(arguments: list[str]) -> dict[str, Any] | int:
    """The command's last line; its status where it failed or said no such thing."""
    given = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *given])},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        return done.returncode
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return 1
    return found


if __name__ == "__main__":
    sys.exit(main())
