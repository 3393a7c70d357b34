"""What loops ask of a model, asked of its engine: it has the module's own answer."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from torch import nn

from ebbtide.engine.held import EngineCore


class ModuleFace(EngineCore):
    def train(self, mode: bool = True) -> Self:
        """`module.train()`."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """`module.eval()`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """`module.training`."""
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """`module.parameters()`: for param groups and counts; values are in `weights` and `resident`."""
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """`module.named_parameters()`."""
        return self.module.named_parameters(*args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        """`module.modules()`."""
        return self.module.modules()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """`module.named_modules()`."""
        return self.module.named_modules(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that are held."""
        self.module.zero_grad(set_to_none)

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
