"""Two ranks on one card: gloo moves CUDA tensors. The same bits as without a budget, and with any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from child_errors import error_in
from results import Store

QUESTION = "two ranks on one card: one hash over budgets, and tokens a second"
STEPS = 4


def run(store: Store, small: bool) -> None:
    for budget in ("auto", "4MB", "3MB") if small else ("auto", "6GB", "4GB"):
        store.part(budget, lambda budget=budget: launched(budget, small), needs=60)
    hashes = {part["sha256"] for name, part in store.parts().items() if "sha256" in part}
    store.part("one hash", lambda: {"same": len(hashes) == 1, "hashes": sorted(hashes)}, needs=0)


def launched(budget: str, small: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command += [__file__, budget, str(int(small)), folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise RuntimeError(error_in(done.stderr))
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    if found[0]["sha256"] != found[1]["sha256"]:
        raise RuntimeError(f"ranks differ: {found}")
    return found[0]  # type: ignore[no-any-return]


def of_a_rank(budget: str, small: bool, folder: Path) -> None:
    import time

    import torch
    import torch.distributed as dist
    from shapes import LLAMA_8B, batch_of, built, spec_for

    import ebbtide

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fields = {**LLAMA_8B, "num_hidden_layers": 4, "vocab_size": 32_000}
    spec = spec_for(fields, small)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    config = {
        "precision": "bf16" if kind == "cuda" else "fp32",
        "clip": 1.0,
        "device": {"kind": kind, "memory": budget},
    }
    if kind == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    engine = ebbtide.initialize(built(spec), config)
    batch = {
        name: value.to(engine.device) for name, value in batch_of(spec, 2, 32 if small else 1024).items()
    }
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.backward(engine(**batch).loss)
        engine.step()
        seconds.append(time.perf_counter() - begin)
    found = {
        "sha256": engine.weights_sha256(),
        "steps_seconds": seconds,
        "peak_bytes": engine.stats()["peak_bytes"],
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    of_a_rank(sys.argv[1], bool(int(sys.argv[2])), Path(sys.argv[3]))
