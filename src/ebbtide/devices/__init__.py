"""Streams, events, copies and raw memory of a compute device: one protocol, `cpu` and `cuda`."""

from __future__ import annotations

import torch

from ebbtide.devices.cpu_device import CpuBackend, Stream
from ebbtide.devices.device import Backend, Event
from ebbtide.errors import ConfigError

__all__ = ["Backend", "CpuBackend", "Event", "Stream", "open_backend"]


def open_backend(kind: str, poison: bool = False) -> Backend:
    """The back end for `auto`, `cuda` or `cpu`."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "device.kind: 'cuda' asked for, but torch sees no CUDA device; use 'cpu' or 'auto'"
            )
        from ebbtide.devices.cuda_device import CudaBackend

        return CudaBackend(poison)
    return CpuBackend(poison)
