"""Forward and backward beside one copying thread, alone and not: a process of its own, for OpenMP reads its
settings once. `python -m ebbtide.forecasting.doctor.spin` prints both as JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time

SECONDS = 1.0
"""Of each measurement."""
TIMEOUT = 60.0


def cost_of_spinning() -> dict[str, float] | None:
    """Seconds of a pass: alone and beside a copy, with OpenMP's threads waiting passively and as its default has it.
    None where the processes did not come to an end."""
    found: dict[str, float] = {}
    for name, policy in (("passive", "passive"), ("default", None)):
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        if policy:
            environment["OMP_WAIT_POLICY"] = policy
        command = [sys.executable, "-m", "ebbtide.forecasting.doctor.spin"]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=True
            )
            values = json.loads(done.stdout)
        except (subprocess.SubprocessError, OSError, ValueError):
            return None
        found |= {f"{name}_{key}": float(value) for key, value in values.items()}
    return found


def _passes(seconds: float) -> float:
    """The median of forward and backward of a block."""
    import torch

    from ebbtide.devices.cpu_device import fast_dtype
    from ebbtide.forecasting.doctor.block import Block

    dtype = fast_dtype()
    module = Block(512).to(dtype)
    x = torch.randn(1, 256, 512).to(dtype).requires_grad_()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 4:
        begin = time.perf_counter()
        module(x).backward()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def main() -> None:
    import torch

    from ebbtide.kernels import cpu_kernels

    kernels = cpu_kernels(1)
    source, target = (torch.ones(32 << 20, dtype=torch.uint8) for _ in range(2))
    alone = _passes(SECONDS)
    over = threading.Event()

    def copy() -> None:
        while not over.is_set():
            kernels.copy(target, source)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        beside = _passes(SECONDS)
    finally:
        over.set()
        thread.join()
    print(json.dumps({"alone": alone, "beside": beside}))


if __name__ == "__main__":
    main()
