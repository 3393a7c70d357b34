"""`ebbtide report`: a run's folder as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def report(
    run: Annotated[
        Path, Argument(help="The folder of a run: --out of `ebbtide train`, or of engine.record().")
    ],
    out: Annotated[Path | None, Option(help="The page's file; left out, report.html in the folder.")] = None,
    perfetto: Annotated[
        Path | None,
        Option(help="Write the recorded steps as a trace for ui.perfetto.dev (.json or .json.gz)."),
    ] = None,
    tensorboard: Annotated[
        Path | None, Option(help="Write the steps' numbers as scalars for TensorBoard, into this folder.")
    ] = None,
    json: Annotated[bool, Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Write a page of what a run did: its verdict, tide, schedule, curves and settings."""
    from ebbtide.cli.doing import doing
    from ebbtide.cli.output import print_json, say
    from ebbtide.report.build_page import figures_of, write_page
    from ebbtide.report.plain_files import PAGE
    from ebbtide.report.run_files import read_run

    files = read_run(run)
    for problem in files.problems:
        say(problem)
    with doing("asking the planner what would change a step"):
        found = figures_of(files)
    path = run / PAGE if out is None else out
    write_page(found, path)
    if perfetto is not None:
        from ebbtide.report.perfetto import write_trace

        counts = write_trace(files, perfetto)
        say(f"the trace is {perfetto}, of {counts.get('X', 0):,} slices: ui.perfetto.dev opens it")
    if tensorboard is not None:
        from ebbtide.report.tensorboard import write_scalars

        say(
            f"{write_scalars(files, tensorboard):,} scalars are in {tensorboard}: tensorboard --logdir {tensorboard}"
        )
    if json:
        print_json({"page": str(path), "verdict": found["verdict"]["sentence"], "problems": files.problems})
    else:
        say(found["verdict"]["sentence"])
        say(f"the page is {path}: open it in a browser")
