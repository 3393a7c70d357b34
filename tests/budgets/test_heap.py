"""What the process does with memory that it has freed; in processes of their own, for such settings stay."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ebbtide.devices import heap
from sampling import some

glibc = pytest.mark.skipif(heap._glibc() is None, reason="settings of glibc's heap")

WITHOUT_POOL = "from ebbtide.devices import heap; heap._use_pool = lambda: False"
MEASURE = """
import psutil, torch
from ebbtide.devices.heap import tune_memory
{before}
tune_memory({scarce})
rss = lambda: psutil.Process().memory_info().rss
block = torch.ones(1)
before = rss()
block = torch.ones(24 << 18)
above = torch.ones(1 << 10)  # lies behind it in a heap, which ends no more where the block begins
held = rss()
del block
print(held - before, rss() - before)
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@glibc
@pytest.mark.parametrize(
    ("before", "scarce", "kept"),
    some([("", True, True), ("", False, True), (WITHOUT_POOL, False, True), (WITHOUT_POOL, True, False)], 2),
)
def test_freed_blocks(before: str, scarce: bool, kept: bool) -> None:
    """Where torch's tensors are not the pool's, scarce memory goes back to the kernel."""
    held, left = (int(word) / (1 << 20) for word in run(MEASURE.format(before=before, scarce=scarce)).split())
    assert held > 0.9 * 24
    assert (left > 0.9 * 24) if kept else (left < 0.1 * 24)


def test_what_tensors_leave_chunks_have_and_the_other_way_round() -> None:
    run("""
        import torch
        from ebbtide.devices import CpuBackend
        from ebbtide.devices.heap import tune_memory
        from ebbtide.devices.pool import in_pool
        early = torch.ones(1 << 20)
        tune_memory(scarce=True)
        backend = CpuBackend()
        tensor = torch.full((8 << 20,), 7, dtype=torch.uint8)
        mapped = in_pool().mapped
        assert in_pool().live >= 8 << 20
        del tensor
        slab = backend.allocate("device", 8 << 20)
        assert bool((slab[::4096] == 7).all()), "not the tensor's memory"
        backend.free("device", slab)
        del slab
        backend.trim(0)  # whoever else wants memory has it already
        assert in_pool().kept >= 8 << 20
        assert bool((torch.empty(8 << 20, dtype=torch.uint8)[::4096] == 7).all())
        assert in_pool().mapped == mapped
        del early  # torch's own allocator has it back
        """)


def test_tensors_of_the_pool_are_like_any_others() -> None:
    run("""
        import os, threading
        import torch
        from ebbtide.devices.heap import tune_memory
        from ebbtide.devices.pool import in_pool
        tune_memory(scarce=False)
        before = in_pool().live
        x = torch.zeros(1 << 20)
        assert not x.any()
        x.resize_(3 << 20)
        x[1 << 20 :] = 2.0
        assert x[: 1 << 20].sum() == 0 and x[-1] == 2
        y = x.clone()
        n = y.numpy()
        n += 1
        del y
        assert n[0] == 1 and n[-1] == 3
        shared = torch.ones(1 << 20).share_memory_()
        assert shared.sum() == 1 << 20
        lazily = torch._lazy_clone(x)
        lazily += 1
        assert lazily[-1] == 3 and x[-1] == 2
        big = torch.randn(512, 512, requires_grad=True)
        (big @ big).relu().sum().backward()
        try:
            torch.empty(1 << 60)
        except RuntimeError as error:
            assert "memory" in str(error)
        else:
            raise AssertionError("an exabyte")
        child = os.fork()
        if child == 0:
            a = torch.empty(1 << 20)  # and no operator that needs OpenMP's threads, which a child has none of
            a[::65536] = 1
            os._exit(0 if float(a[::65536].sum()) == 16 else 1)
        assert os.waitpid(child, 0)[1] == 0
        del x, n, lazily, big, shared
        assert in_pool().live == before, (in_pool(), before)
        """)


def test_a_child_that_is_forked_while_others_allocate_is_not_stuck() -> None:
    run("""
        import os, threading
        import torch
        from ebbtide.devices.heap import tune_memory
        tune_memory(scarce=False)
        stop = threading.Event()
        def churn():
            while not stop.is_set():
                torch.empty(1 << 20)
        threads = [threading.Thread(target=churn) for _ in range(2)]
        [thread.start() for thread in threads]
        for _ in range(30):
            child = os.fork()
            if child == 0:
                torch.empty(1 << 20)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        [thread.join() for thread in threads]
        """)


def test_steps_like_those_before_have_no_fresh_memory() -> None:
    """With state on SSD, and a budget that activations and chunks share."""
    run("""
        import tempfile
        import torch
        from ebbtide.devices.heap import tune_memory
        from ebbtide.devices.pool import in_pool
        from ebbtide.bench.ssd_budgets import for_share
        from ebbtide.bench.steps import Ours, tokens
        from ebbtide.models import find_model
        from pathlib import Path
        base = {"precision": "fp32", "updates": "in-backward"}
        with tempfile.TemporaryDirectory() as folder:
            config = base | for_share(base, "gpt2-tiny", 0.9, 1, 256, Path(folder))
            tune_memory(scarce=True)
            ours = Ours("gpt2-tiny", tokens("gpt2-tiny", 1, 256), config, module=find_model("gpt2-tiny").on_meta())
            for _ in range(6):
                ours.step()
            ours.engine.synchronize()
            before = in_pool()
            for _ in range(4):
                ours.step()
            ours.engine.synchronize()
            found = in_pool()
            ours.close()
        assert found.live > 1 << 20
        assert found.mapped - before.mapped < (found.live + found.kept) // 4, (before, found)
        """)


@glibc
def test_a_loop_of_ones_own_has_the_pool_for_the_asking(tmp_path: Path) -> None:
    """Torch's large tensors come from where chunks leave theirs; the numbers stay the same."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})
        import torch
        import ebbtide, zoo
        from ebbtide.devices import heap
        shas = []
        for tuned in (False, True):
            engine = ebbtide.initialize(
                zoo.build("gpt2"),
                {{"device": {{"kind": "cpu", "memory": "3MB"}}, "host": {{"memory": 0}},
                 "ssd": {{"folder": {str(tmp_path)!r}, "memory": "64MB"}}}},
            )
            if tuned:
                assert not heap.keeps_freed_memory
                ebbtide.tune_memory(engine)
            for number in range(3):
                engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
                engine.step()
            shas.append(engine.weights_sha256())
            engine.close()
        assert shas[0] == shas[1]
        print(heap.keeps_freed_memory)
    """
    assert run(script).split()[-1] == "True"
