"""Ranges with our names inside torch.profiler: which of a timeline is a chunk's move, or the executor's own work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

profiled = torch.autograd._profiler_enabled
"""Whether a profiler of torch's is at work."""
UNNAMED: AbstractContextManager[Any] = nullcontext()
"""In place of a range, where nobody looks."""


def in_profile(name: str) -> AbstractContextManager[Any]:
    """Around something that is to have a name there."""
    return record_function(f"ebbtide: {name}")
