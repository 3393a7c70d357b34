"""Writes docs/performance.md from benchmarks/results: a table a question, with command, machine and date.

    python benchmarks/performance.py          # writes it
    python benchmarks/performance.py --check  # exits with 1 where the page is not what the results give

No figure of the page is typed by hand. A file that lacks a machine, a date or a command shows a dash there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
DASH = "-"
COLUMNS = 120
"""Of a line of prose."""
Row = dict[str, str]


@dataclass(frozen=True)
class Result:
    file: Path
    data: dict[str, Any]

    @property
    def date(self) -> str:
        return str(self.data.get("date", ""))

    @property
    def machine(self) -> str:
        found = self.data.get("machine", DASH)
        if not isinstance(found, dict):
            return str(found)
        if "name" in found:
            return str(found["name"])
        gpu, cpu = found.get("gpu"), str(found.get("cpu", found.get("host", DASH)))
        cores = "" if "core" in cpu or "cores" not in found else f", {found['cores']} cores"
        flags = "".join(f", {flag}" for flag in found.get("flags", ()))
        return str(gpu) if gpu else cpu + cores + flags


@dataclass(frozen=True)
class Question:
    asked: str
    answer: str
    """How to read the table."""
    pattern: str
    """Of files."""
    rows: Callable[[Result], Iterator[Row]]
    command: str = ""
    """Where the files do not say."""
    named_by: int = 1
    """So many columns, from the left, say what was measured; of each only the newest file's rows are shown."""

    def kind(self, row: Row) -> tuple[str, ...]:
        return tuple(row.values())[: self.named_by]


def overhead(result: Result) -> Iterator[Row]:
    found = result.data.get("overhead")
    for one in found if isinstance(found, list) else [found] if found else []:
        if "ours_ms" in one:
            times = f"{one['ours_ms']:.1f} ms", f"{one['plain_ms']:.1f} ms"
            model = "GPT 1.1B, 4 x 1,024 tokens"
        elif "ours_seconds" in one:
            times = f"{one['ours_seconds']:.2f} s", f"{one['plain_seconds']:.2f} s"
            model = f"{one['model']}, {one['batch']} x {one['seq']}, {one.get('precision', 'bf16')}"
        else:
            continue
        yield {"model": model, "ours": times[0], "plain PyTorch": times[1], "ratio": f"{one['ratio']:.2f}"}


def budgets(result: Result) -> Iterator[Row]:
    found = result.data.get("offload")
    if not isinstance(found, dict) or "rows" not in found:
        return
    for row in found["rows"]:
        if "ratio" not in row:
            continue
        over = row.get("over_minimum")
        yield {
            "model": f"{found['model']}, {found['batch']} x {found['seq']}",
            "model data on the device": str(row["share"]),
            "step over resident": f"{row['ratio']:.2f}",
            "moved a step": size(row["moved_bytes"]),
            "over the least": DASH if over is None else f"{over:.2f}",
        }


def card(result: Result) -> Iterator[Row]:
    one = result.data.get("offload", {})
    if "step_seconds" not in one:
        return
    seconds = sorted(one["step_seconds"][2:])
    yield {
        "model": f"GPT {one['parameters'] / 1e9:.2f}B under 24 GB, 4 x 1,024 tokens",
        "step": f"{seconds[len(seconds) // 2]:.2f} s",
        "tokens a second": f"{one['tokens_per_second']:,.0f}",
        "TFLOP/s": f"{one['tflops']:.0f}",
        "first and second step": f"{one['step_seconds'][0]:.1f} s, {one['step_seconds'][1]:.1f} s",
    }


def queued(result: Result) -> Iterator[Row]:
    for name, part in result.data["parts"].items():
        if "error" in part:
            yield {"what": f"{result.data['name']}: {name}", "figure": part["error"]}
        elif "tokens_per_second" in part:
            bound = part.get("achieved_over_bound")
            share = (
                "" if bound is None else f"; {100 * bound:.0f} % of the bound, which is {part['bound_by']}"
            )
            yield {
                "what": f"{result.data['name']}: {name}",
                "figure": f"{part['tokens_per_second']:,.0f} tokens a second{share}",
            }


def peers(result: Result) -> Iterator[Row]:
    data = result.data
    for row in data["rows"]:
        known = "error" not in row
        yield {
            "model": f"{data['model']}, {data['batch']} x {data['sequence']}, {data['precision']}",
            "system": row["peer"],
            "step": f"{row['seconds']:.2f} s" if known else row["error"],
            "peak RSS": size(row["peak_rss"]) if known else DASH,
            "its time over ours": f"{row['time_over_ours']:.2f}" if "time_over_ours" in row else DASH,
            "its RSS over ours": f"{row['rss_over_ours']:.2f}" if "rss_over_ours" in row else DASH,
        }


def compiled(result: Result) -> Iterator[Row]:
    data = result.data
    for name, row in data["rows"].items():
        yield {
            "model": f"{data['model']}, {data['batch']} x {data['seq']}, {data['precision']}",
            "ours": name,
            "step": f"{row['ours_seconds']:.2f} s",
            "plain compiled": f"{row['plain_seconds']:.2f} s",
            "ratio": f"{row['ratio']:.2f}",
        }


def losses(result: Result) -> Iterator[Row]:
    data = result.data
    yield {
        "tokens x words": f"{data['tokens']:,} x {data['vocabulary']:,}, width {data['width']}, {data['precision']}",
        "time over all logits": f"{data['ratio']:.2f}",
        "peak in pieces, whole": f"{size(data['peak_bytes']['pieces'])}, {size(data['peak_bytes']['whole'])}",
        "fallen by, in logits": f"{data['fallen']:.2f}",
    }


def largest(result: Result) -> Iterator[Row]:
    data = result.data
    yield {
        "parameters": f"{data['params'] / 1e9:.2f}B",
        "step": f"{data['step_seconds']:.0f} s",
        "tokens a second": f"{data['tokens_per_second']:.1f}",
        "read from SSD": size(data["ssd_read_bytes"]),
    }


def recording(result: Result) -> Iterator[Row]:
    data = result.data
    yield {
        "model": f"{data['model']}, {data['batch']} x {data['seq']}",
        "share of a step": f"{100 * data['share']:.3f} %",
        "steps in pairs": f"{data['pairs_ratio']:.2f}",
    }


QUESTIONS = (
    Question(
        "What does the engine cost where everything fits?",
        "A ratio below 1 is faster than plain PyTorch with fused AdamW on fp32 masters.",
        "*.json",
        overhead,
        "ebbtide bench overhead, on a card make gpu-check",
    ),
    Question(
        "What does a smaller device budget cost?",
        "A step against the resident one, and what moved against the least that any plan must move.",
        "cpu-*.json",
        budgets,
        "ebbtide bench offload",
        named_by=2,
    ),
    Question(
        "What do compiled blocks bring?",
        "Against plain PyTorch with the same blocks compiled.",
        "compiled-*.json",
        compiled,
        "ebbtide bench compiled",
        named_by=2,
    ),
    Question(
        "What does the loss in pieces save?",
        "Head and cross entropy, forward and backward, against all logits at once.",
        "loss-*.json",
        losses,
        "ebbtide bench loss",
    ),
    Question(
        "How fast is a model that the card does not hold?",
        "Exact AdamW with clipping and checkpointing, updated on the host.",
        "gpu-*.json",
        card,
    ),
    Question(
        "What has the queue for a card shown?",
        "`make gpu-queue` lists the scripts and when they were run.",
        "gpu/*.json",
        queued,
    ),
    Question(
        "How does it compare with others where everything is in RAM?",
        "A process each, in turn. A row is held against ours of the same kind: compiled, or as written. What a system "
        "cannot run is its own error.",
        "peers-ram-*.json",
        peers,
        named_by=2,
    ),
    Question(
        "How does it compare with DeepSpeed's NVMe offload?",
        "GPT-2 with optimizer state on SSD, side by side; plain PyTorch has everything in RAM. "
        "`benchmarks/peers/run_peers.py nvme` has taken the place of the script that older files name.",
        "*nvme-*.json",
        peers,
        named_by=2,
    ),
    Question(
        "How large a model trains on two cores and 24 GB?",
        "GPT with state on SSD, exact AdamW steps.",
        "scale-*.json",
        largest,
    ),
    Question(
        "What does recording a run cost?",
        "`engine.record`.",
        "recording-*.json",
        recording,
        "ebbtide bench recording",
    ),
)


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:,.0f} B"


def page() -> str:
    parts = [
        "# Performance",
        "",
        "`python benchmarks/performance.py` writes this page from `benchmarks/results/`; no figure is typed by hand.",
        "Each table has the newest figure of each kind; the older ones are in the files. Ratios were measured in turn",
        "on one machine. With several GPUs ebbtide has not been run; its many ranks are tested on CPUs.",
    ]
    for question in QUESTIONS:
        parts += ["", f"## {question.asked}", "", fill(question.answer, COLUMNS), "", *table(question)]
    return "\n".join(parts) + "\n"


def table(question: Question) -> list[str]:
    rows: list[Row] = []
    commands = []
    seen: set[tuple[str, ...]] = set()
    for result in results(question.pattern):
        new = [row for row in question.rows(result) if question.kind(row) not in seen]
        seen.update(question.kind(row) for row in new)
        where = {"machine": result.machine, "date": result.date or DASH, "file": result.file.name}
        rows += [{**row, **where} for row in new]
        command = result.data.get("command") or question.command
        if new and command and command not in commands:
            commands.append(command)
    if not rows:
        return ["Not measured yet."]
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(row.get(name, DASH).replace('|', '/') for name in names)} |" for row in rows]
    return [*lines, "", *(f"    {command}" for command in commands)]


def results(pattern: str) -> list[Result]:
    """The newest first."""
    found = [Result(file, json.loads(file.read_text())) for file in sorted(RESULTS.glob(pattern))]
    return sorted(found, key=lambda one: one.date, reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where the page is another"
    )
    options = parser.parse_args()
    made = page()
    if options.check:
        same = PAGE.exists() and PAGE.read_text() == made
        if not same:
            print(
                "docs/performance.md is not what the results give: run python benchmarks/performance.py",
                file=sys.stderr,
            )
        return 0 if same else 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
