"""A causal language model's head and loss in pieces, for models that are written as Hugging Face's are: forward gives
hidden states to the head, and what the head gives to `model.loss_function`.

The head hands its input on, and the loss function computes both. That is right where nothing lies between them (a soft
cap, a factor): a call of the model's last lines, with nothing before them, tells. It is right only in a forward of
transformers' own, without hooks: another one may read logits, too. Logits are not made then, and what asks the output
for them is told so. Passes without gradients make them as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.nn import functional

from ebbtide.errors import ConfigError
from ebbtide.nn.blockwise_loss import linear_cross_entropy, saves_memory

LOSS = "ForCausalLMLoss"
"""The loss that is known: the mean, or the sum over `num_items_in_batch`, of shifted labels' cross entropy."""


WHY = (
    'a training pass with loss = "pieces" makes no logits. Set loss = "whole" in the config, or compute them without '
    "gradients (torch.no_grad())"
)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(f"this output has no logits: {WHY}")


class LogitsNotMade:
    """In an output's place for logits."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: this output has no logits: {WHY}")

    def __reduce__(self) -> tuple[Any, ...]:
        return LogitsNotMade, ()

    __getitem__ = __len__ = __iter__ = __float__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = (
        _refuse
    )
    __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __torch_function__ = classmethod(_refuse)


@dataclass(frozen=True)
class _InPlaceOf:
    """A function that is not a copy's: that has the usual one."""

    ours: Callable[..., Any]
    usual: Callable[[dict[int, Any]], Any]
    """Of what has been copied by now, by the number of what it is a copy of."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ours(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.usual(memo)


class LossInPieces:
    """On a model, until it is removed."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._head = model, head_of(model)
        self._whole: Callable[..., Any] = model.loss_function  # type: ignore[assignment]
        self._before = vars(model).get("_loss_function")
        self._labels = False
        self._handed: torch.Tensor | None = None
        """What the head has handed on."""
        self._made = True
        """Whether the output has logits."""
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]
        head, whole = self._head, self._whole
        head.forward = _InPlaceOf(self._hand_on, lambda memo: MethodType(nn.Linear.forward, memo[id(head)]))
        model.loss_function = _InPlaceOf(self._loss, lambda memo: whole)  # type: ignore[assignment]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        vars(self._head).pop("forward", None)
        vars(self._model).pop("_loss_function", None)
        if self._before is not None:
            self._model._loss_function = self._before

    # -- in a pass ------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if args and labels is None:
            labels = signature(module.forward).bind_partial(*args, **kwargs).arguments.get("labels")
        self._labels = labels is not None and torch.is_grad_enabled()
        self._handed, self._made = None, True

    def _hand_on(self, hidden: torch.Tensor) -> torch.Tensor:
        vocabulary, width = self._head.weight.shape
        if not self._labels or not saves_memory(hidden.numel() // max(1, width), vocabulary, width):
            return functional.linear(hidden, self._head.weight, self._head.bias)
        self._handed = hidden.view_as(hidden)
        return self._handed

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """As transformers' own, of what the head was given."""
        if self._handed is not None and logits is not self._handed:
            raise ConfigError(
                'loss = "pieces": something between the head and the loss of this model made another tensor of what the '
                'head gave (a hook, a module on the host); use loss = "whole"'
            )
        if self._handed is None:
            return self._whole(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **others,
            )
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        self._made = False
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = linear_cross_entropy(
            logits,
            self._head.weight,
            shift_labels.to(logits.device).reshape(logits.shape[:-1]),
            self._head.bias,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    def _end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        made, handed = self._made, self._handed
        self._handed, self._made, self._labels = None, True, False
        if made:
            return None
        if isinstance(output, tuple):
            return tuple(LogitsNotMade() if one is handed else one for one in output)
        if output is not None:
            output["logits"] = LogitsNotMade()
        return output


# -- which models ------------------------------------------------------------------------------------------


def best_loss(loss: str, model: nn.Module) -> str:
    """The setting for a loop that reads no logits."""
    if loss != "auto":
        return loss
    return "whole" if obstacle(model) else "pieces"


def head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def obstacle(model: nn.Module) -> str:
    """Why the model's head and loss cannot be computed in pieces; empty where they can."""
    written = getattr(type(model).forward, "__module__", "")
    if not written.startswith("transformers.models."):
        return f"its forward is written in {written}, and may read logits besides"
    if model._forward_hooks:
        return "it has forward hooks, which may read logits"
    function = getattr(model, "loss_function", None)
    if getattr(function, "__name__", "") != LOSS:
        return f"its loss is not the cross entropy that Hugging Face's causal models have ({LOSS})"
    head = head_of(model) if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear or "forward" in vars(head):
        return f"its head is a {type(head).__name__}, not a Linear layer"
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    if not isinstance(base, nn.Module) or base is model:
        return "its base model is not known"
    return "" if _head_to_loss(model, head, base) else "something lies between its head and its loss"


class _Outputs:
    """A base model's outputs that have hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place == 0 else ()


class _Handed(torch.Tensor):
    """What the head gives in a trial; it notes whatever is done with it, beside questions for its shape and the like."""

    used: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ != "__get__":
            cls.used.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _head_to_loss(model: Any, head: nn.Linear, base: nn.Module) -> bool:
    """Whether what the head gives is what the loss is given, by a call of the model's last lines."""
    handed: list[torch.Tensor] = []
    found: list[bool] = []

    def hand_on(hidden: torch.Tensor) -> torch.Tensor:
        handed.append(hidden.detach().as_subclass(_Handed))
        return handed[-1]

    def loss(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        found.append(len(handed) == 1 and logits is handed[0])
        return torch.zeros(())

    hidden = torch.zeros(1, 2, head.in_features)
    _Handed.used.clear()
    ids = torch.zeros(1, 2, dtype=torch.long)
    before = dict(vars(model))
    kept = vars(base).get("forward")
    try:
        head.forward = hand_on  # type: ignore[method-assign, assignment]
        base.forward = lambda *_, **__: _Outputs(hidden)
        model.loss_function = loss
        with torch.no_grad():
            model.forward(input_ids=ids, labels=ids)
    except Exception:
        return False  # whatever its last lines want that is not here
    finally:
        vars(head).pop("forward", None)
        vars(base).pop("forward", None)
        if kept is not None:
            base.forward = kept
        for name in ("_loss_function", "loss_function"):
            vars(model).pop(name, None)
            if name in before:
                vars(model)[name] = before[name]
    return found == [True] and not _Handed.used
