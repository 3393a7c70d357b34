"""The native kernels: pointers into tensors, handed to native.cpp by a fixed set of threads.

Short vectors run on the caller's thread. Longer ones are shared with the helpers; the caller takes part, so
it never waits for a helper that is busy elsewhere. Results do not depend on who did what.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from queue import SimpleQueue
from typing import SupportsFloat

import torch
from torch import Tensor

from ebbtide.kernels.base import (
    BLOCK,
    TYPES,
    Operands,
    Scaling,
    form_of,
    require_bytes,
    require_capture,
    require_numbers,
    require_ranks,
    require_vectors,
    require_weighed,
)
from ebbtide.kernels.fallback import FallbackKernels, deliver
from ebbtide.kernels.rule import Rule

SHORT, SHORT_BYTES, SHORT_LOOK = 1 << 17, 1 << 21, 1 << 24
"""Up to this, waking a helper costs more than it saves."""

Function = Callable[..., None]
Call = tuple[Function, tuple[object, ...], int]
"""A function, its pointers, and for how many elements."""


class NativeKernels:
    """`Kernels` through the compiled library, on CPU tensors (see base.py)."""

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        self.threads = torch.get_num_threads() if threads is None else threads
        self._library = library
        self._functions: dict[str, Function | None] = {}
        self._pairwise = library.pairwise
        self._pairwise.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._pairwise.restype = ctypes.c_double
        self._helpers = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="ebbtide-kernels")
        self._of_thread = threading.local()
        self._fallback = FallbackKernels()

    def update(self, rule: Rule, operands: Operands, coefficients: Sequence[float]) -> None:
        self.update_all(rule, [(operands, coefficients)])

    def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
        held: list[Operands] = []

        def calls() -> Iterator[Call]:
            for operands, coefficients in pieces:
                held.append(operands)  # helpers may be at it when the next one is listed
                function = self._find(_name(rule, operands), 7)
                if function is None:
                    self._fallback.update(rule, operands, coefficients)
                else:
                    yield _update(function, operands, coefficients)

        self._run_all(calls())

    def guarded(
        self, rule: Rule, sums: Sequence[SupportsFloat], losses: Sequence[Tensor], scaling: Scaling
    ) -> None:
        return None

    def capture(self, destination: Tensor, source: Tensor, add: bool) -> float:
        require_capture(destination, source)
        _require_cpu(destination)
        if source.dtype == destination.dtype and source.stride() == destination.stride() and source.is_cpu:
            return self._sum("add" if add else "copy", destination, source.data_ptr())
        deliver(destination, source, add)
        return self._sum("look", destination, None)

    def weigh(self, destination: Tensor, source: Tensor, weight: float, add: bool) -> None:
        require_vectors(destination, source)
        require_weighed(destination, source)
        _require_cpu(destination)
        number = ctypes.c_float(weight)
        name = f"{'add' if add else 'copy'}_weighted_{TYPES[destination.dtype]}_{TYPES[source.dtype]}"
        pointers = (destination.data_ptr(), source.data_ptr(), ctypes.addressof(number))
        self._run(self._get(name, 5), pointers, source.numel())

    def sum_of_squares(self, flat: Tensor) -> float:
        require_vectors(flat)
        _require_cpu(flat)
        return self._sum("look", flat, None)

    def read(self, sums: Sequence[SupportsFloat]) -> list[float]:
        return [float(one) for one in sums]

    def block_sums(self, flat: Tensor) -> Tensor:
        require_vectors(flat)
        _require_cpu(flat)
        sums = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float64, device="cpu")
        pointers = (flat.data_ptr(), None, sums.data_ptr())
        self._run(self._get(f"look_{TYPES[flat.dtype]}", 5), pointers, flat.numel())
        return sums

    def pairwise(self, sums: Tensor) -> float:
        return float(self._pairwise(sums.data_ptr(), sums.numel()))

    def sum_ranks(self, destination: Tensor, received: Tensor, scale: float) -> None:
        require_vectors(destination)
        require_vectors(received)
        ranks, each = require_ranks(destination, received), destination.numel()
        _require_cpu(destination)
        counts = (ctypes.c_int64 * 2)(ranks, each)
        first = ctypes.addressof(counts)
        number = ctypes.c_float(scale)
        pointers = (destination.data_ptr(), received.data_ptr(), first, first + 8, ctypes.addressof(number))
        self._run(self._get(f"sum_ranks_{TYPES[destination.dtype]}", 7), pointers, each)

    def look(self, flats: Sequence[Tensor], norm: bool) -> list[float]:
        for flat in flats:
            require_vectors(flat)
            _require_cpu(flat)
        lengths = [flat.numel() for flat in flats]
        short = SHORT if norm or sum(lengths) > SHORT_LOOK else SHORT_LOOK
        counts = [-(-length // BLOCK) if norm else 1 for length in lengths]
        places = list(accumulate(counts, initial=0))[:-1]
        found = (ctypes.c_double * sum(counts))() if norm else (ctypes.c_int64 * sum(counts))()
        calls: list[Call] = []
        for flat, length, place in zip(flats, lengths, places, strict=True):
            address, type_ = ctypes.addressof(found) + 8 * place, TYPES[flat.dtype]
            if norm:
                calls.append((self._get(f"look_{type_}", 5), (flat.data_ptr(), None, address), length))
            else:
                calls.append((self._get(f"nonfinite_{type_}", 4), (flat.data_ptr(), address), length))
        self._run_all(calls, short)
        if not norm:
            return [math.nan if one else 0.0 for one in found]
        first = ctypes.addressof(found)
        return [float(self._pairwise(first + 8 * place, n)) for place, n in zip(places, counts, strict=True)]

    def split(self, master32: Tensor, parameter: Tensor, master: Tensor | None) -> None:
        require_numbers(master32)
        require_vectors(master32, parameter, master)
        _require_cpu(parameter)
        alone = master is None and parameter.dtype != torch.float32
        form = f"{TYPES[parameter.dtype]}_alone" if alone else form_of(parameter, master)
        pointers = (parameter.data_ptr(), _pointer(master), master32.data_ptr())
        self._run(self._get(f"split_{form}", 5), pointers, parameter.numel())

    def join(self, parameter: Tensor, master: Tensor | None, out: Tensor | None = None) -> Tensor:
        form = form_of(parameter, master)
        if out is None:
            out = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        require_numbers(out)
        require_vectors(parameter, master, out)
        _require_cpu(parameter)
        pointers = (parameter.data_ptr(), _pointer(master), out.data_ptr())
        self._run(self._get(f"join_{form}", 5), pointers, out.numel())
        return out

    def copy(self, destination: Tensor, source: Tensor) -> None:
        require_bytes(destination, source)
        require_vectors(destination, source)
        _require_cpu(destination)
        pointers = (destination.data_ptr(), source.data_ptr())
        self._run(self._get("move", 4), pointers, destination.numel(), SHORT_BYTES)

    def _sum(self, deed: str, to: Tensor, source: int | None) -> float:
        length = to.numel()
        blocks = -(-length // BLOCK)
        sums = getattr(self._of_thread, "sums", None)
        if sums is None or len(sums) < blocks:
            sums = self._of_thread.sums = (ctypes.c_double * max(blocks, SHORT // BLOCK))()
        self._run(self._get(f"{deed}_{TYPES[to.dtype]}", 5), (to.data_ptr(), source, sums), length)
        return float(self._pairwise(sums, blocks))

    def _run(self, function: Function, pointers: tuple[object, ...], length: int, short: int = SHORT) -> None:
        if length <= short or self.threads == 1:
            function(*pointers, None, length)
        else:
            self._run_all([(function, pointers, length)], short)

    def _run_all(self, calls: Iterable[Call], short: int = SHORT) -> None:
        """Calls for vectors that have no element in common. Helpers are woken once: they begin with the first long ones
        while others are still being listed, and share them all with the caller."""
        shared: list[tuple[Call, ctypes.c_int64]] = []
        queues: list[SimpleQueue[tuple[Call, ctypes.c_int64] | None]] = []
        helping: list[Future[None]] = []
        try:
            for function, pointers, length in calls:
                if length <= short or self.threads == 1:
                    function(*pointers, None, length)
                    continue
                shared.append(((function, pointers, length), ctypes.c_int64(0)))
                if not queues:
                    queues = [SimpleQueue() for _ in range(self.threads - 1)]
                    helping = [self._helpers.submit(_work_off, iter(queue.get, None)) for queue in queues]
                for queue in queues:
                    queue.put(shared[-1])
            _work_off(shared)
        finally:
            for queue in queues:
                queue.put(None)
            _end(helping)

    def _get(self, name: str, arguments: int) -> Function:
        function = self._find(name, arguments)
        if function is None:
            raise ValueError(f"there is no native kernel {name}")
        return function

    def _find(self, name: str, arguments: int) -> Function | None:
        """The function, with its pointers and its length declared; None where the library has none."""
        if name not in self._functions:
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes = (*[ctypes.c_void_p] * (arguments - 1), ctypes.c_int64)
                function.restype = None
            self._functions[name] = function
        return self._functions[name]


def _work_off(calls: Iterable[tuple[Call, ctypes.c_int64]]) -> None:
    """Each with its counter of Note "shared work" in native.cpp."""
    for (function, pointers, length), drawn in calls:
        function(*pointers, ctypes.addressof(drawn), length)


def _name(rule: Rule, o: Operands) -> str:
    return f"{rule.name}_{form_of(o.parameter, o.master)}_{TYPES[o.gradient.dtype]}"


def _update(function: Function, o: Operands, coefficients: Sequence[float]) -> Call:
    _require_cpu(o.parameter)
    states = (ctypes.c_void_p * len(o.states))(*[state.data_ptr() for state in o.states])
    numbers = (ctypes.c_float * len(coefficients))(*coefficients)
    pointers = (o.parameter.data_ptr(), o.gradient.data_ptr(), _pointer(o.master), states, numbers)
    if o.parameter.numel() and not all((pointers[1], *states, o.master is None or pointers[2])):
        raise ValueError("expected gradient, master and optimizer state with memory, found one without")
    return function, pointers, o.parameter.numel()


def _end(helping: Sequence[Future[None]]) -> None:
    """Helpers use the caller's memory until they are done."""
    for helper in helping:
        if not helper.cancel():
            helper.result()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _require_cpu(tensor: Tensor) -> None:
    if tensor.numel() and not tensor.data_ptr():
        raise ValueError(
            "expected a tensor with memory, found one without: a fake or meta tensor has no numbers"
        )
    if not tensor.is_cpu:
        raise ValueError(f"expected CPU tensors for the native kernels, found one on {tensor.device}")
