"""Head and loss by blocks of tokens against torch's own of all logits: time and memory of forward and backward."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ebbtide.bench.progress import Report, silent
from ebbtide.bench.steps import median_ratio, most_allocated, race, suited
from ebbtide.nn import linear_cross_entropy
from ebbtide.runtime.parameters.selection import PRECISIONS

SPREAD = 0.02
"""Of a head's weights, as models draw them. With 1 most gradients would be denormal numbers, whose products took seventy
times as long on one processor."""


def run(
    tokens: int = 8192,
    vocabulary: int = 131_072,
    width: int = 512,
    repeats: int = 3,
    precision: str = "auto",
    report: Report = silent,
) -> dict[str, Any]:
    """`fallen`: by how many times the logits' bytes, in the precision that is computed in, the peak is lower."""
    precision = suited(precision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drawn = torch.Generator().manual_seed(0)
    rows, weight = (
        (spread * torch.randn(shape, generator=drawn)).to(device, PRECISIONS[precision]).requires_grad_()
        for spread, shape in ((1.0, (tokens, width)), (SPREAD, (vocabulary, width)))
    )
    target = torch.randint(0, vocabulary, (tokens,), generator=drawn).to(device)

    def step(loss: Callable[[], torch.Tensor]) -> float:
        rows.grad = weight.grad = None
        found = loss()
        found.backward()
        return float(found.detach())

    jobs = {
        "whole": lambda: step(
            lambda: functional.cross_entropy(functional.linear(rows, weight).float(), target)
        ),
        "pieces": lambda: step(lambda: linear_cross_entropy(rows, weight, target)),
    }
    losses = {name: job() for name, job in jobs.items()}
    peaks = {name: most_allocated(job, device) for name, job in jobs.items()}
    seconds = race(jobs, repeats, warm_up=1, report=report)
    logits = tokens * vocabulary * rows.element_size()
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "width": width,
        "repeats": repeats,
        "precision": precision,
        "ratio": median_ratio(seconds["pieces"], seconds["whole"]),
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
        "peak_bytes": peaks,
        "logits_bytes": logits,
        "fallen": (peaks["whole"] - peaks["pieces"]) / logits,
        "losses": losses,
    }
