import gc
import os
import signal
import warnings
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests start many processes, and each would compile all that it imports of ebbtide anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

import sampling

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has whatever it runs in the background ignore interrupts, and some tests are about those.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    sampling.take(all_cases="not heavy" not in config.option.markexpr)


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    """The number of threads changes numbers; two everywhere."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def imagined_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in long proofs, for to imagine a pass must not break a budget either, nor in those about it
    (`IMAGINES = True`)."""
    if "heavy" not in request.keywords and not getattr(request.module, "IMAGINES", False):
        from ebbtide.runtime.planning import tracer
        from imagined import once

        monkeypatch.setattr(tracer, "trace_symbolically", once(tracer.trace_symbolically, _imagined))


_imagined: dict[Hashable, Any] = {}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For files of the SSD tier, on a file system with direct access or without."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no direct access")
        yield tmp_path


def pytest_collection_finish() -> None:
    """Every engine has the collector look at all there is when it begins, and what was imported stays anyhow: a tenth of
    the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(getattr(item, "module", None), "group_of"):
            item.add_marker(pytest.mark.xdist_group("ranks"))  # the groups of processes are started once
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
