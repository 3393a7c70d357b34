"""Several hosts: network namespaces of this machine, each with an address of its own, and a link between that can be
slow, and can be cut."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from test_ranks_cli import SMALL, result, text

__all__ = ["text"]
RANKS = 4
PORT = 29517
LINK = "200mbit"
"""A fiftieth of what the machine does within itself, and less."""


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Hosts:
    """Two, with two ranks each."""

    def __init__(self) -> None:
        self.names = [f"ebbtide-{os.getpid()}-{place}" for place in "ab"]
        self.links = [f"eb{os.getpid()}{place}"[:15] for place in "ab"]

    def open(self) -> None:
        for name in self.names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for number, (name, link) in enumerate(zip(self.names, self.links, strict=True), 1):
            sh("ip", "link", "set", link, "netns", name)
            sh("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            for device in ("lo", link):
                sh("ip", "-n", name, "link", "set", device, "up")

    def slow(self, host: int, rate: str) -> None:
        limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        sh("tc", "-n", self.names[host], "qdisc", "add", "dev", self.links[host], "root", *limit)

    def cut(self) -> None:
        sh("ip", "-n", self.names[0], "link", "set", self.links[0], "down")

    def start(self, host: int, *command: str, **more: str) -> subprocess.Popen[str]:
        there = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.links[host], **more}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | there,
        )

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.open()
        yield made
    finally:
        made.close()


@contextmanager
def ending(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finished(process: subprocess.Popen[str], seconds: float) -> subprocess.CompletedProcess[str]:
    out, said = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, out, said)


@pytest.mark.heavy
def test_ranks_of_two_hosts_train_over_a_slow_link(hosts: Hosts, text: Path) -> None:
    flags = ["-m", "ebbtide", "train", *SMALL, "--data", str(text), "--json", "--steps", "4"]
    hosts.slow(1, LINK)
    each = [
        hosts.start(
            host, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={host}",
            "--master-addr=10.77.0.1", f"--master-port={PORT}", *flags,
        )
        for host in range(2)
    ]  # fmt: skip
    with ending(each):
        first, second = (finished(one, 300) for one in each)
    found = result(first)
    assert second.returncode == 0 and not second.stdout.strip(), second.stderr
    assert found["ranks"] == RANKS and found["moved_bytes"]["wire"] > 0
    single = subprocess.run(
        [sys.executable, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert found["losses"] == pytest.approx(result(single)["losses"], rel=2e-2)


@pytest.mark.heavy
def test_a_link_that_is_lost_ends_all_ranks_and_is_told(hosts: Hosts, text: Path, tmp_path: Path) -> None:
    hosts.slow(1, LINK)
    flags = ["-m", "ebbtide", "train", *SMALL, "--data", str(text), "--steps", "100000"]
    flags += ["--out", str(tmp_path / "run")]
    ranks = [hosts.start(rank // 2, *flags, **place(rank)) for rank in range(RANKS)]
    with ending(ranks):
        metrics = tmp_path / "run" / "metrics.jsonl"
        until = time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert time.monotonic() < until and all(one.poll() is None for one in ranks)
            time.sleep(0.05)
        hosts.cut()
        begun = time.monotonic()
        ended: list[Any] = [finished(one, 90) for one in ranks]
        assert time.monotonic() - begun < 75, "a minute for the loss to be noticed, and some seconds to end"
    for rank, one in enumerate(ended):
        assert one.returncode == 2, (rank, one.returncode, one.stderr)
        assert "gone or does not answer" in one.stderr and "Traceback" not in one.stderr, (rank, one.stderr)
    there = ended[0].stderr
    assert all(f"rank {rank}" in there for rank in (2, 3)), there


def place(rank: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": str(PORT + 1),
        "WORLD_SIZE": str(RANKS),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
    }
