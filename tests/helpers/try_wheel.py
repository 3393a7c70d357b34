"""What an installed wheel does where there is neither a compiler nor NumPy: train, save, load, export, report.

`make wheel-check` runs it in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import ebbtide
from ebbtide.kernels.compiler import FOLDER, KERNELS, compiler
from ebbtide.report.build_page import figures_of, write_page
from ebbtide.report.run_files import read_run


def start() -> ebbtide.Engine:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    config = {"chunk_size": "16KiB", "precision": "fp32", "device": {"kind": "cpu", "memory": "250KB"}}
    return ebbtide.initialize(module, config)


def train(engine: ebbtide.Engine, first: int, last: int) -> None:
    for number in range(first, last):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x).square().mean())
        engine.step()


def main() -> None:
    assert importlib.util.find_spec("numpy") is None, "NumPy is there"
    assert compiler() is None, "a compiler is there"
    assert "site-packages" in ebbtide.__file__, ebbtide.__file__
    found = KERNELS.find()
    assert found is not None and found.parent == FOLDER, "the wheel has no kernels for this machine"
    with tempfile.TemporaryDirectory() as place:
        engine = start()
        train(engine, 0, 2)
        engine.save(f"{place}/run", {"epoch": 1})
        train(engine, 2, 4)
        expected = engine.weights_sha256()
        engine.close()
        again = start()
        assert again.load(f"{place}/run") == {"epoch": 1}
        again.record(f"{place}/recorded")
        train(again, 2, 4)
        assert again.weights_sha256() == expected
        again.export(f"{place}/weights")
        again.close()
        files = sorted(path.name for path in Path(place, "weights").iterdir())
        third = start()
        third.load_weights(f"{place}/weights")
        assert third.weights_sha256() == expected
        third.close()
        write_page(figures_of(read_run(Path(place, "recorded"))), Path(place, "page.html"))
        assert "A step takes" in Path(place, "page.html").read_text(), "the wheel wrote no page"
    assert "numpy" not in sys.modules
    print(f"the wheel trained, saved, loaded and exported {files} to the same bits, and wrote a page of it")


if __name__ == "__main__":
    main()
