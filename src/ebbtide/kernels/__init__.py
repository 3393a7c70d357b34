"""Updates, gradient sums, master weights, copies: the operations that give the same bits on every device."""

import torch

from ebbtide.errors import warn_user
from ebbtide.kernels.base import BLOCK, Decision, Guarded, Kernels, Operands, Scaling
from ebbtide.kernels.cpu import NativeKernels
from ebbtide.kernels.fallback import FallbackKernels
from ebbtide.kernels.rule import ADAM, ADAMW, RULES, Rule, require_settings

__all__ = [
    "ADAM",
    "ADAMW",
    "BLOCK",
    "RULES",
    "Decision",
    "FallbackKernels",
    "Guarded",
    "Kernels",
    "NativeKernels",
    "Operands",
    "Rule",
    "Scaling",
    "cpu_kernels",
    "gpu_kernels",
    "require_settings",
]


def cpu_kernels(threads: int | None = None, native: bool | None = None) -> Kernels:
    """The kernels for CPU tensors: native where that can be had; `native` says it must, or must not."""
    from ebbtide.kernels.compiler import load

    library = load() if native is not False else None
    if library is not None:
        return NativeKernels(library, threads)
    if native:
        raise RuntimeError("there are no native kernels; `python -m ebbtide.kernels.compiler` says why")
    return FallbackKernels()


def gpu_kernels(device: str = "cuda") -> Kernels:
    """The kernels for tensors on a GPU."""
    try:
        from ebbtide.kernels.gpu import TritonKernels
    except ImportError as error:
        warn_user(f"ebbtide runs its GPU kernels through plain torch: {error}")
        return FallbackKernels()
    kernels = TritonKernels()
    try:
        kernels.sum_of_squares(torch.ones(8, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # there is no C compiler, or Triton does not know the driver
        warn_user(f"ebbtide runs its GPU kernels through plain torch: Triton cannot compile here ({error})")
        return FallbackKernels()
    return kernels
