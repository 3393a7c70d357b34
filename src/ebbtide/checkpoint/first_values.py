"""Where a session's first values come from, when not from the module itself: construction, or weight files."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import nn

from ebbtide.checkpoint.construct import Construction, meta_tensors
from ebbtide.checkpoint.weight_files import WeightFiles
from ebbtide.errors import UnsupportedError
from ebbtide.runtime.parameters.initial_values import replace


class Start:
    """Values of what the module left on the meta device; everything is known, or refused, before any is made.

    A parameter stays the same object, so that param groups made from it keep working.
    """

    def __init__(self, module: nn.Module, files: WeightFiles | None) -> None:
        self._module = module
        self._files = files
        self.given: set[str] = set()
        """Names whose values came from the files."""
        self._undo: list[partial[None]] = []
        self._seed = torch.get_rng_state()
        by_id: dict[int, tuple[str, torch.Tensor]] = {}
        for name, _, _, tensor in meta_tensors(module):
            by_id.setdefault(id(tensor), (name, tensor))
            if weakref.getweakrefs(tensor):
                raise UnsupportedError(
                    f"{name} is on the meta device and something holds a weak reference to it, as recurrent layers do, "
                    "so it cannot be given memory in place; build the model on the CPU"
                )
        wanted = {key for key, (name, _) in by_id.items() if files is None or name not in files}
        self._construction = Construction(module, wanted) if wanted else None
        self._tensors = dict(by_id.values())

    def value(self, name: str) -> torch.Tensor | None:
        """A tensor's first value; None where the module holds it already."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if self._files is not None and name in self._files:
            self.given.add(name)
            return self._files.tensor(name)
        assert self._construction is not None
        return self._construction.value(tensor)

    def fill(self) -> None:
        """What lies outside the chunks: unmanaged parameters, buffers, tensors that a module keeps beside them."""
        for name, tensor in self._tensors.items():
            value = self.value(name) if tensor.is_meta else None
            if value is not None:
                shape, stride, dtype = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
                self._undo.append(partial(replace, tensor, tensor.detach()))
                laid = value
                if isinstance(tensor, nn.Parameter):
                    laid = torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(value)
                replace(tensor, laid.to(dtype))

    def finish(self) -> None:
        """All is taken over: random numbers go on as after construction on the CPU."""
        if self._construction is not None and self._files is None:
            self._construction.finish()
        self._construction = None

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        torch.set_rng_state(self._seed)
