"""A backward pass that the user's code started, looked at operator by operator.

Autograd runs every node of a graph under the thread-local state that its caller had: a dispatch mode that is pushed
while one node runs is gone with it. So the mode is pushed before each node and popped after it. What autograd adds up
between two nodes it adds without the mode; the next node is given the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LEAF = "torch::autograd::AccumulateGrad"


class ByNode:
    def __init__(self) -> None:
        self._mode: TorchDispatchMode | None = None
        self._note: Callable[[Any], None] = lambda gradients: None
        self._seen: set[Any] = set()
        self._handles: list[Any] = []

    @contextmanager
    def around(self, mode: TorchDispatchMode, note: Callable[[Any], None]) -> Iterator[None]:
        """A backward: `mode` is around each node that `reach` has come to; `note` is told of what nodes are given."""
        self._mode, self._note = mode, note
        try:
            yield
        finally:
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()
            self._mode = None
            self._seen = set()

    def reach(self) -> None:
        """A node is about to run: it has the mode, and so has what is behind it, but for leaves, which stay."""
        running = torch._C._current_autograd_node()
        if self._mode is None or running is None or running in self._seen:
            return
        self._seen.add(running)
        todo = [running]
        while todo:
            following = {node for node, _ in todo.pop().next_functions if node is not None} - self._seen
            self._seen |= following
            todo += following
            for node in following:
                if node.name() != LEAF:
                    self._handles += [node.register_prehook(self._before), node.register_hook(self._after)]
        torch._C._push_on_torch_dispatch_stack(self._mode)  # it ends with the node

    def _before(self, gradients: Any) -> None:
        assert self._mode is not None
        torch._C._push_on_torch_dispatch_stack(self._mode)
        self._note(gradients)

    def _after(self, *_: Any) -> None:
        torch._C._pop_torch_dispatch_stack(None)
