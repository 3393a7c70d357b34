"""The classes that parameters wear while no module computes with them.

Away: the chunk is elsewhere, and the parameter's memory is a placeholder of NaN. Shape, dtype, device, gradient and
hooks answer; a read or write of values raises. It never brings its chunk by itself, for a view that outlives the call
would keep nothing in place.

InPlace: the chunk is on the device, between passes. PyTorch counts a write into a parameter, but not one through
`.data`, numpy or a storage, and a chunk that leaves later would lose it. So the class notes who takes such an alias;
before the next pass, or a read of the value, a checksum tells whether it was written.

In a pass, and within `engine.resident()`, parameters have the class that they came with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ebbtide.errors import StateError

_ALIASES = frozenset(
    (
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.__dlpack__,
    )
)


_told: dict[int, Callable[[], None]] = {}
"""By parameter (its number as an object): who is told before its memory is given out."""


def tell(parameter: nn.Parameter, told: Callable[[], None]) -> None:
    """From now on the parameter wears this class, until it is taken off."""
    _told[id(parameter)] = told
    parameter.__class__ = InPlace


def forget(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        _told.pop(id(parameter), None)


def _unmasked(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call with parameters of the class that they came with: torch 2.11's fake mode takes no other. The
    parameters wear theirs again when the call returns."""
    worn: list[Any] = [one for one in tree_iter((args, kwargs)) if type(one) is InPlace]
    for one in worn:
        one.__class__ = nn.Parameter
    try:
        return func(*args, **kwargs)
    finally:
        for one in worn:
            one.__class__ = InPlace


class InPlace(nn.Parameter):
    """Worn between passes; it behaves as the parameter does."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ALIASES and type(args[0]) is InPlace:
                told = _told.get(id(args[0]))
                if told is not None:
                    told()
            if torch._C._len_torch_dispatch_stack():
                return _unmasked(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            made = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = made
        return made


_PROPERTIES = """
    shape dtype device requires_grad grad grad_fn ndim layout itemsize nbytes names name output_nr retains_grad
    grad_dtype _version _base _backward_hooks _post_accumulate_grad_hooks _cdata
"""
_METHODS = """
    size dim ndimension numel nelement element_size stride storage_offset untyped_storage get_device has_names
    __hash__ __len__ __dir__ register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
    new_empty new_zeros new_ones new_full new_tensor new_empty_strided
"""
_FUNCTIONS = """
    numel is_floating_point is_complex is_same_size is_signed is_inference result_type
    _has_compatible_shallow_copy_type empty_like zeros_like ones_like full_like rand_like randn_like randint_like
"""
_NOT = ("is_set_to", "is_nonzero", "is_coalesced")
_SET = ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype")

_MARK = "_ebbtide"
"""The attribute of a parameter that has its name, and what is said of its engine where that is closed. Not a weak
dictionary: a parameter on the meta device that something refers to weakly cannot be given memory."""


@cache
def answers() -> frozenset[Any]:
    """What asks for no values."""
    asked = {name for name in dir(torch.Tensor) if name.startswith(("is_", "_is_")) and name not in _NOT}
    found: list[Any] = [getattr(torch, name) for name in _FUNCTIONS.split() if hasattr(torch, name)]
    for name in {*asked, *_PROPERTIES.split(), *_METHODS.split()}:
        known = getattr(torch.Tensor, name, None)
        if known is not None:
            found.append(known if callable(known) else known.__get__)
    found += [torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward]
    for name in _SET:
        if hasattr(torch.Tensor, name):
            found.append(getattr(torch.Tensor, name).__set__)
            found.append(getattr(torch.Tensor, name).__delete__)
    return frozenset(found)


def name_of(function: Any) -> str:
    """As whoever reads a message would write it: a property's reader has it on its descriptor."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return f".{getattr(function.__self__, '__name__', name)}"
    return name


def held_in(args: Any, kind: tuple[type, ...]) -> Any:
    """The first of that kind among what a function was given, in lists of tensors, too."""
    for value in args:
        if isinstance(value, kind):
            return value
        if isinstance(value, list | tuple) and (found := held_in(value, kind)) is not None:
            return found
    return None


class Away(nn.Parameter):
    """Worn from when a parameter's chunk leaves until it is back."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in answers() or _is_state_dict(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        values = (*args, *(kwargs or {}).values())
        away = held_in(values, _kinds())
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return f"Parameter({name_of_managed(away)}, away, size={tuple(away.shape)}, dtype={away.dtype})"
        raise StateError(_refusal(away, name_of(func)))


def _is_state_dict(func: Any) -> bool:
    """A module's state_dict() detaches its parameters, and is given their values right after."""
    if func is not torch.Tensor.detach:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code is nn.Module._save_to_state_dict.__code__


@cache
def _kind_of_parts(kind: type) -> type:
    """What a DTensor wears."""

    def refuse(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Away.__torch_function__.__func__(cls, func, types, args, kwargs)  # type: ignore[attr-defined]

    return type("AwayPart", (kind,), {"__slots__": (), "__torch_function__": classmethod(refuse)})


_parts: list[type] = []


def _kinds() -> tuple[type, ...]:
    return (Away, *_parts)


def plainly() -> Any:
    """A context for loops of the engine's over many parameters: what is worn asks for time with each look."""
    return torch._C.DisableTorchFunctionSubclass()


def wear(parameter: torch.Tensor) -> None:
    """Its memory is a placeholder from now on. What has a class of the user's keeps it."""
    kind = type(parameter)
    if kind is nn.Parameter or kind is InPlace:
        parameter.__class__ = Away
    elif kind.__name__ == "DTensor":
        worn = _kind_of_parts(kind)
        if worn not in _parts:
            _parts.append(worn)
        parameter.__class__ = worn


def take_off(parameter: torch.Tensor) -> None:
    """It has its values again."""
    kind = type(parameter)
    if kind is Away or kind is InPlace:
        parameter.__class__ = nn.Parameter
    elif kind in _parts:
        parameter.__class__ = kind.__mro__[1]


def known_as(parameter: torch.Tensor, name: str) -> None:
    """What messages call it."""
    setattr(parameter, _MARK, (id(parameter), name, ""))


def closed(parameter: torch.Tensor, reason: str) -> None:
    """Its engine is closed: there is no value to have any more."""
    setattr(parameter, _MARK, (id(parameter), name_of_managed(parameter), reason))


def released(parameter: torch.Tensor) -> None:
    """It is an ordinary parameter again."""
    vars(parameter).pop(_MARK, None)


def name_of_managed(parameter: Any) -> str:
    """Nothing where it never was in an engine's chunks, or the engine is closed."""
    known, name, over = getattr(parameter, _MARK, (0, "", ""))
    return "" if over or known != id(parameter) else str(name)  # a copy may have the attribute, too


def _refusal(parameter: Any, asked: str) -> str:
    _, name, over = getattr(parameter, _MARK, (0, "a parameter", ""))
    if over:
        return f"{name}: {asked} needs its values, and the module {over}"
    return (
        f"{name} is away: {asked} needs its values, which are in a chunk that is elsewhere now. In forward read "
        f"it as an attribute of its module. Elsewhere engine.weights({name!r}) gives its value, and stores it with "
        "write=True; engine.resident() keeps all parameters in place for a while, write=True to change them; "
        "engine.ema(decay) keeps an average. `unmanaged` in the config leaves a parameter out of the chunks"
    )
