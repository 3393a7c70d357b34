"""Whether the code that asks runs in an imagined pass: `ebbtide.imagining()`.

A pass is imagined under a fake mode of ours. Torch takes its modes along to the threads of a backward pass, so what asks
there is told the same; a thread that the user's code started is not in the pass.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_FAKE = torch._C._TorchDispatchModeKey.FAKE


class ImaginedMode(FakeTensorMode):
    """The fake mode of a pass that is imagined."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


def imagining() -> bool:
    """Whether this runs in a pass that the engine only imagines, to know what memory it will take: before the first
    batch of a shape, under a budget. Tensors have shapes there and no values. What must happen once for each real pass
    and lies where the engine cannot put it back (a request over a network, an experiment tracker) asks this first."""
    return isinstance(torch._C._get_dispatch_mode(_FAKE), ImaginedMode)
