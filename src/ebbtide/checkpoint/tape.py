"""Operators that were run on the meta device, written down so that any one tensor can be computed later.

Nothing is computed while recording: large and random tensors are made on meta, small deterministic ones
(ranges, tables) on the CPU as always. `Replay` then computes one storage at a time from the operators that
matter to it. Random numbers come in recorded order: an operator that is passed over still advances the generator,
and the generator's state before it is kept, should its result be wanted later.

Some of torch.nn.init leaves meta tensors alone, because how often it draws depends on what it drew. Such a call is
seen by its looking at `is_meta`, and written down as one operator.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ebbtide.errors import UnsupportedError

META = torch.device("meta")
BLANK = {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}
LARGE = {"empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "eye"}
"""Factories that are sent to meta; `torch.tensor`, ranges and windows stay real."""
DRAWS_IN_PLACE = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_",
}  # fmt: skip
DRAWS = DRAWS_IN_PLACE | {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
}  # fmt: skip
"""What may draw numbers: how many depends on the sizes alone."""
OVERWRITES = DRAWS_IN_PLACE | {"zero_", "fill_", "copy_"}


@dataclass(frozen=True, slots=True)
class Ref:
    """A recorded tensor: a view of a recorded storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Op:
    func: Any
    args: Any
    kwargs: Any
    """With Refs in place of meta tensors, and copies of real ones."""
    outputs: tuple[Ref, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    renews: frozenset[int]
    """Storages that it overwrites whole, without reading them."""
    draws: bool
    blank: bool


class Tape(TorchDispatchMode):
    """Records within `recording()`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.sizes: list[int] = []
        self.untouchable: set[int] = set()
        """Addresses of real storages that are not to be written while recording."""
        self._ids: dict[int, int] = {}
        self._alive: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        with _SkippedInits(self), self:
            yield

    def ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._ids:
            self._ids[key] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._alive.append(storage)
        return Ref(
            self._ids[key],
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        draws = torch.Tag.nondeterministic_seeded in func.tags
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = _written(func, args, kwargs)
        if any(not t.is_meta and t.untyped_storage().data_ptr() in self.untouchable for t in written):
            raise UnsupportedError(f"{name} would write into a tensor that is not on the meta device")
        if draws or name in LARGE:
            if any(a.name == "device" for a in func._schema.arguments):
                kwargs["device"] = META
        elif not any(t.is_meta for t in tensors) and kwargs.get("device") != META:
            return func(*args, **kwargs)
        if draws and (name not in DRAWS or kwargs.get("generator") is not None):
            raise UnsupportedError(f"{name} draws random numbers in a way that cannot be repeated")
        if any(not t.is_meta for t in written):
            raise UnsupportedError(
                f"{name} writes values that are on the meta device into a tensor that is not"
            )
        out = func(*tree_map(_lift, args), **tree_map(_lift, kwargs))
        self._add(func, name, args, kwargs, tensors, written, out, draws)
        return out

    def _add(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        written: list[torch.Tensor],
        out: Any,
        draws: bool,
    ) -> None:
        if name in ("set_", "resize_"):
            raise UnsupportedError(f"{name} changes a tensor's memory")
        inputs = {self.ref(t).storage for t in tensors if t.is_meta}
        outputs = tuple(self.ref(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_meta)
        made = frozenset(ref.storage for ref in outputs) - inputs
        targets = [self.ref(t) for t in written]
        if not made and not targets:
            return  # a view
        overwriting = name in OVERWRITES or func._schema.overload_name.endswith("out")
        whole = {r.storage for r in targets if overwriting and self._is_whole(r)}
        sources = {
            self.ref(t).storage for t in tensors if t.is_meta and not any(t is other for other in written)
        }
        reads = frozenset(sources | ({r.storage for r in targets} - whole))

        def keep(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return torch.device("cpu") if x == META else x
            return self.ref(x) if x.is_meta else x.detach().clone()

        self.ops.append(
            Op(
                func,
                tree_map(keep, args),
                tree_map(keep, kwargs),
                outputs if made else (),
                reads,
                frozenset(r.storage for r in targets) | made,
                frozenset(whole - sources) | made,
                draws,
                name in BLANK,
            )
        )

    def add_init(self, name: str, arguments: dict[str, Any]) -> None:
        """A call of torch.nn.init on a meta tensor."""
        if arguments.get("generator") is not None:
            raise UnsupportedError(f"{name} draws random numbers in a way that cannot be repeated")
        target = self.ref(arguments["tensor"])
        storage = frozenset({target.storage})
        whole = storage if self._is_whole(target) else frozenset()
        call = partial(_call_init, name)
        kwargs = arguments | {"tensor": target}
        self.ops.append(Op(call, (), kwargs, (), storage - whole, storage, whole, name != "dirac_", False))

    def _is_whole(self, ref: Ref) -> bool:
        count = 1
        for size in ref.shape:
            count *= size
        distinct = all(stride > 0 for size, stride in zip(ref.shape, ref.stride, strict=True) if size > 1)
        return distinct and count * ref.dtype.itemsize == self.sizes[ref.storage]


class _SkippedInits(TorchFunctionMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if out is True and func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__") == "torch.nn.init":
                code = caller.f_code
                named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                self._tape.add_init(code.co_name, {name: caller.f_locals[name] for name in named})
        return out


def _call_init(name: str, **arguments: Any) -> None:
    getattr(torch.nn.init, name)(**arguments)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def _lift(x: Any) -> Any:
    """A real tensor's likeness on meta, so that it can meet others there."""
    if isinstance(x, torch.Tensor) and not x.is_meta and x.dim() > 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
    return x


class Replay:
    """Computes recorded tensors, one at a time and in any order."""

    def __init__(self, tape: Tape) -> None:
        self._ops, self._sizes = tape.ops, tape.sizes
        self._writers: dict[int, list[int]] = {}
        for index, op in enumerate(self._ops):
            for storage in op.writes:
                self._writers.setdefault(storage, []).append(index)
        self._draws = [index for index, op in enumerate(self._ops) if op.draws]
        self._next = 0
        self._slices: dict[int, list[int]] = {}
        self._wanted: Counter[int] = Counter()
        self._states: dict[int, torch.Tensor] = {}

    def require(self, storage: int) -> bool:
        """Announces that a storage will be asked for; False where its contents are not told by the tape."""
        if storage not in self._slices:
            found = self._slice(storage)
            if found is None:
                return False
            self._slices[storage] = found
            self._wanted.update(i for i in found if self._ops[i].draws)
        return True

    def drawn(self, storage: int) -> Iterable[Op]:
        """The operators that draw a required storage's random numbers."""
        return [self._ops[i] for i in self._slices[storage] if self._ops[i].draws]

    def _slice(self, storage: int) -> list[int] | None:
        """The operators that matter to a storage's last contents, in order."""
        chosen: set[int] = set()
        done: set[tuple[int, int]] = set()
        stack = [(len(self._ops), storage)]
        while stack:
            limit, current = stack.pop()
            for index in reversed(self._writers.get(current, [])):
                if index >= limit:
                    continue
                op = self._ops[index]
                if (index, current) in done:
                    break
                done.add((index, current))
                if op.blank:
                    return None
                chosen.add(index)
                stack += [(index, other) for other in op.reads if other != current]
                if current in op.renews and current not in op.reads:
                    break
            else:
                return None
        return sorted(chosen)

    def value(self, ref: Ref) -> torch.Tensor:
        """A required tensor, on the CPU."""
        indices = self._slices[ref.storage]
        last = {s: i for i in indices for s in (*self._ops[i].reads, *self._ops[i].writes)}
        memory: dict[int, torch.UntypedStorage] = {}
        for index in indices:
            if self._ops[index].draws:
                self._draw(index, memory)
            else:
                self._run(index, memory)
            for storage in [s for s in memory if s != ref.storage and last.get(s, index) <= index]:
                del memory[storage]
        return self._view(ref, memory)

    def finish(self) -> None:
        """Leaves the generator as the recorded operators would have."""
        self._advance(len(self._ops))

    def _draw(self, index: int, memory: dict[int, torch.UntypedStorage]) -> None:
        if index in self._states:
            now = torch.get_rng_state()
            torch.set_rng_state(self._states[index])
            self._run(index, memory)
            torch.set_rng_state(now)
            return
        assert self._next == 0 or self._draws[self._next - 1] < index, (
            "a recorded tensor may be asked for once"
        )
        self._advance(index)
        if self._wanted[index] > 1:
            self._states[index] = torch.get_rng_state()
        self._run(index, memory)
        self._next += 1

    def _advance(self, until: int) -> None:
        while self._next < len(self._draws) and self._draws[self._next] < until:
            index = self._draws[self._next]
            if self._wanted[index]:
                self._states[index] = torch.get_rng_state()
            self._run(index, {})
            self._next += 1

    def _run(self, index: int, memory: dict[int, torch.UntypedStorage]) -> None:
        op = self._ops[index]

        def real(x: Any) -> Any:
            return self._view(x, memory) if isinstance(x, Ref) else x

        with torch.no_grad():
            out = op.func(*tree_map(real, op.args), **tree_map(real, op.kwargs))
            tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            for ref, tensor in zip(op.outputs, tensors, strict=bool(op.outputs)):
                if ref.storage in memory:
                    continue
                if (tuple(tensor.stride()), tensor.storage_offset()) == (ref.stride, ref.offset):
                    memory[ref.storage] = tensor.untyped_storage()
                else:
                    self._view(ref, memory).copy_(tensor)

    def _view(self, ref: Ref, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if ref.storage not in memory:
            memory[ref.storage] = torch.empty(
                self._sizes[ref.storage], dtype=torch.uint8, device="cpu"
            ).untyped_storage()
        return torch.empty(0, dtype=ref.dtype, device="cpu").set_(
            memory[ref.storage], ref.offset, ref.shape, ref.stride
        )
