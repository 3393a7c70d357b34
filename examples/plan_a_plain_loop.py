"""Trace and planner by themselves, for a training loop that is not ebbtide's.

The loop below is plain PyTorch. It keeps the optimizer state of some layers "on the device" and of the others "on the
host" (two optimizers, each with parameters of its own), and wants to know which, and what would have to move when.
`ebbtide.trace` says what an iteration uses and how much activations leave free; the planner answers from that.

    python examples/plan_a_plain_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

import ebbtide
from ebbtide.layout import build_layout
from ebbtide.planner.placement import make_plan
from ebbtide.planner.shape import ModelShape, Settings
from ebbtide.units import format_size

WIDTH, LAYERS, BATCH = 256, 8, 64
DEVICE, HOST = 6 << 20, 64 << 20
"""Bytes that the plan may use."""
MOMENTS_BYTES = 8
"""Adam's state, an element of a parameter in fp32."""


def build() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def shape_of(traced: ebbtide.Trace) -> tuple[ModelShape, list[list[str]]]:
    """One chunk a layer's tensor group; what is in each, by name."""
    layout = build_layout(traced.tensors, "chunk", WIDTH * WIDTH + 1024)
    chunk = [layout.spans[tensor.name].chunk for tensor in traced.tensors]
    sizes = tuple(4 * one.size for one in layout.chunks)
    states = tuple(MOMENTS_BYTES * one.size for one in layout.chunks)
    runs = tuple(tuple(sorted({chunk[p] for p in run})) for run in traced.runs)
    names = [list(layout.names_of(one.index)) for one in layout.chunks]
    return ModelShape(runs, tuple(chunk), sizes, sizes, states), names


def main() -> None:
    with torch.device("meta"):  # nothing is allocated to plan
        imagined = build()
    traced = ebbtide.trace(imagined, torch.empty(BATCH, WIDTH, device="meta"))
    record = traced.record
    print(f"{len(record.moments)} moments, activations take up to {format_size(record.peak)}")

    shape, names = shape_of(traced)
    plan = make_plan(shape, record, Settings(DEVICE, HOST))
    print(f"in {format_size(DEVICE)}: {format_size(plan.traffic)} move in each step")
    for moment, triggers in enumerate(plan.triggers):
        for trigger in triggers:
            kind, chunk = plan.items[trigger.item]
            way = "to the device" if trigger.fetch else "to the host"
            print(f"  moment {moment:3}: {kind:5} of chunk {chunk} {way}")

    torch.manual_seed(0)
    model = build()
    parameters = dict(model.named_parameters())
    homes: dict[str, list[nn.Parameter]] = {"device": [], "host": []}
    for chunk, home in enumerate(plan.homes):
        homes[home] += [parameters[name] for name in names[chunk]]
    optimizers = [torch.optim.AdamW(group, lr=1e-3) for group in homes.values() if group]
    for step in range(5):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    held = {home: format_size(MOMENTS_BYTES * sum(p.numel() for p in group)) for home, group in homes.items()}
    print(
        f"optimizer state: {held['device']} on the device, {held['host']} on the host; loss {loss.item():.3f}"
    )


if __name__ == "__main__":
    main()
