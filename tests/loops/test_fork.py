"""A forked child has an engine's memory and none of its threads: it ends, and is refused the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sampling import crossed

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from torch import nn
import ebbtide

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()

folder = sys.argv[1]
place = {"ssd": {"folder": folder, "memory": "8MB"}, "host": {"memory": 0}} if folder else {}
config = {"precision": "fp32", "chunk_size": "16KiB", "device": {"kind": "cpu", "memory": "400KB"}} | place

def train(engine, steps):
    for _ in range(steps):
        engine.backward(engine(torch.ones(4, 64)))
        engine.step()

engine = ebbtide.initialize(Net(), config)
train(engine, 2)
child = os.fork()
if not child:
    for use in (lambda: engine(torch.ones(4, 64)), engine.step, engine.state_dict, engine.weights_sha256):
        try:
            use()
            sys.exit(3)
        except ebbtide.errors.StateError as error:
            assert "a forked child" in str(error), error
    if sys.argv[2] == "close":
        engine.close()
    elif sys.argv[2] == "collect":
        import gc
        del engine, use
        gc.collect()
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
train(engine, 2)
engine.check_integrity()
found = engine.weights_sha256()
engine.close()
alone = ebbtide.initialize(Net(), config)
train(alone, 4)
assert found == alone.weights_sha256()
alone.close()
sys.exit(status)
"""


@pytest.mark.parametrize(("end", "ssd"), crossed(["exit", "close", "collect"], [True, False]))
def test_a_forked_child_ends_and_its_parent_goes_on(tmp_path: Path, ssd: bool, end: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path) if ssd else "", end],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the child, too, when it never ends
    )
    try:
        _, errors = run.communicate(timeout=90)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0 and "Error" not in errors, errors
    assert not list(tmp_path.glob("*.data"))
