"""Backward passes that an engine started: what one brings to another engine's parameters is no pass of that one's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_tasks: set[int] = set()
"""autograd's numbers of them, from when each has begun."""


@contextmanager
def leading(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Around such a one: gives what to go back from. Its node is the first that runs, before any of the graph's."""
    with torch.inference_mode(False), torch.enable_grad():
        root, begun = loss.view_as(loss), set[int]()

    def begin(_: object) -> None:
        begun.add(torch._C._current_graph_task_id())
        _tasks.update(begun)

    assert root.grad_fn is not None
    root.grad_fn.register_prehook(begin)
    try:
        yield root
    finally:
        _tasks.difference_update(begun)


def is_led() -> bool:
    """Whether the backward that runs now is one."""
    return torch._C._current_graph_task_id() in _tasks
