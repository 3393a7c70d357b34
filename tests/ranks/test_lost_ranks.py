"""A rank that is gone: the others name it by the launcher's number, in a group of a mesh, too, wherever they wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sampling import some

BEGIN = """
import os, sys, time, warnings
import torch
import torch.distributed as dist
from datetime import timedelta
import ebbtide
from ebbtide.checkpoint import dcp_planners, saving
from ebbtide.errors import DiskError, RanksError
from ebbtide.runtime.distributed.ranks import Ranks
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

def start():
    torch.manual_seed(0)
    return ebbtide.initialize(torch.nn.Linear(8, 8), {"precision": "fp32", "device": {"kind": "cpu"}})

def step(engine):
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()

def die(*_, **__):
    os._exit(9)
"""


def said_by(rank: int, size: int, script: str, folder: Path) -> str:
    """What one of the ranks prints; all of them run the script."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    path = folder / "script.py"
    path.write_text(BEGIN + textwrap.dedent(script))
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    told |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), str(folder / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | told | {"RANK": str(one)},
        )
        for one in range(size)
    ]
    try:
        return ranks[rank].communicate(timeout=120)[0]
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


def test_in_a_group_of_a_mesh_it_has_its_own_number(tmp_path: Path) -> None:
    script = """
        groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        ranks = Ranks(groups[rank % 2])
        if rank == 3:
            die()
        if rank == 1:
            try:
                ranks.objects(1)
            except RanksError as error:
                print(error)
        else:
            time.sleep(60)
    """
    assert "rank 3 of 4 is gone" in said_by(1, 4, script, tmp_path)


@pytest.mark.parametrize("what", some(["save", "load"], 1))
def test_during_a_save_or_a_load_it_is_named(what: str, tmp_path: Path) -> None:
    script = f"""
        engine = start()
        engine.save(sys.argv[1])
        if rank == 1:
            dcp_planners.{"write" if what == "save" else "read"}_distributed = die
        try:
            engine.{what}(sys.argv[1])
        except RanksError as error:
            print("found:", error)
        os._exit(0)
    """
    assert "found: rank 1 of 2 is gone" in said_by(0, 2, script, tmp_path)


def test_a_save_in_the_background_waits_no_longer_for_it(tmp_path: Path) -> None:
    script = """
        saving.SILENCE, saving.OTHERS_END = 0.1, 1.0
        engine = start()
        step(engine)
        saving.PendingSave._sign = die if rank == 1 else saving.PendingSave._sign
        engine.save(sys.argv[1], background=True)
        try:
            while True:
                step(engine)
        except RanksError as error:
            print("found:", error)
        begun = time.monotonic()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                engine.wait_for_save()
            except DiskError as error:
                print("save:", error)
        print(*(one.message for one in told), sep="\\n")
        print("waited", time.monotonic() - begun < 15)
        os._exit(0)
    """
    said = said_by(0, 2, script, tmp_path)
    assert "found: rank 1 of 2 is gone" in said and "waited True" in said
    assert "rank 1 has not written its part of the checkpoint of step 1" in said
    assert not list((tmp_path / "run").glob("step-*"))
