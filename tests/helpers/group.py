"""Processes that train together, for tests: each is started once and does what it is told.

`Group.run(function, *arguments)` calls the function in every rank and returns what they return, by rank. A rank that
raises, dies or does not answer makes it fail with what that rank said; the group is then started anew.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

import sampling

PATIENCE = 120.0
"""Seconds that a call may take."""


class RankError(AssertionError):
    """What went wrong in a rank."""


def _work(rank: int, size: int, store: str, remember: bool, asked: Any, answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch.distributed as dist

    if remember:
        from ebbtide.runtime.planning import tracer
        from imagined import once

        tracer.trace_symbolically = once(tracer.trace_symbolically)  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (order := asked.get()) is not None:
        number, function, arguments = order
        try:
            answers.put((number, rank, True, function(*arguments)))
        except BaseException:
            answers.put((number, rank, False, traceback.format_exc()))


def _end_with_parent() -> None:
    """A parent that is killed ends nobody, and its queues are open as long as a rank has them."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def as_torchrun_says() -> Iterator[int]:
    """The environment of a rank of a group is as if torchrun had started it. Gives its number."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in said.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"})  # not asked: the group has joined
    try:
        yield rank
    finally:
        os.environ.clear()
        os.environ.update(before)


class Group:
    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._number = 0

    def run(self, function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> list[Any]:
        if not self._processes:
            self._start()
        self._number += 1
        for asked in self._asked:
            asked.put((self._number, function, arguments))
        found: dict[int, Any] = {}
        try:
            self._collect(found, time.monotonic() + patience)
        except BaseException:
            self.stop()
            raise
        return [found[rank] for rank in range(self.size)]

    def _collect(self, found: dict[int, Any], until: float) -> None:
        while len(found) < self.size:
            try:
                number, rank, good, answer = self._answers.get(timeout=0.2)
            except queue.Empty:
                dead = [r for r, one in enumerate(self._processes) if not one.is_alive() and r not in found]
                if dead:
                    codes = [self._processes[r].exitcode for r in dead]
                    raise RankError(f"ranks {dead} died (exit codes {codes})") from None
                if time.monotonic() > until:
                    missing = sorted(set(range(self.size)) - set(found))
                    self._say_where(missing)
                    raise RankError(f"ranks {missing} do not answer") from None
                continue
            if number == self._number and not good:
                raise RankError(f"rank {rank} of {self.size}:\n{answer}")
            if number == self._number:
                found[rank] = answer

    def _say_where(self, ranks: list[int]) -> None:
        """Has them print what they are at, for whoever reads the test's output."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _start(self) -> None:
        context = _context()
        self._folder = tempfile.TemporaryDirectory()
        self._asked = [context.Queue() for _ in range(self.size)]
        self._answers = context.Queue()
        store = str(Path(self._folder.name) / "store")
        for rank, asked in enumerate(self._asked):
            arguments = (rank, self.size, store, not sampling.everything(), asked, self._answers)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes = []


@cache
def _context() -> Any:
    """Processes begin as copies of one that has imported what a rank needs, and done nothing else: starting it anew
    would be most of the time of a test whose ranks die."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness", "ebbtide.engine"])
    before = os.environ.get("PYTHONPATH")
    folders = sorted(str(one) for one in Path(__file__).parents[1].iterdir() if one.is_dir())
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


@cache
def group_of(size: int) -> Group:
    """One for all tests; its processes end with this one."""
    return Group(size)
