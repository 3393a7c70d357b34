"""A session's values by name: loaded in master precision, stored through master and parameter alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ebbtide.errors import ConfigError, StateError, nearest, warn_user
from ebbtide.memory.chunk_access import copy_out
from ebbtide.memory.dtensors import part_like, split_of
from ebbtide.runtime.parameters import element_access
from ebbtide.runtime.parameters.binding import dense
from ebbtide.runtime.session import Session


def names(session: Session) -> list[str]:
    """All parameters, managed or not, each once, in the module's order. They are those that the engine took over: of
    others it has no values, and under other names it would give those of the wrong ones."""
    taken = dict(zip(session.data.names, session.data.parameters, strict=True)) | session.unmanaged.parameters
    found = dict(session.module.named_parameters())
    for name, parameter in found.items():
        if taken.get(name) is not parameter:
            raise StateError(
                f"the module has another {name} than when the engine took it over: "
                f"{_what_became(name, parameter, taken)}. Change modules before initialize(), or write values with "
                "engine.weights(name, write=True)"
            )
    for name in taken:
        if name not in found:
            raise StateError(
                f"the module no longer has {name}, which the engine took over: it was removed, or tied to another "
                "parameter, since. Change modules before initialize(), or put it back"
            )
    return list(found)


def _what_became(name: str, parameter: torch.Tensor, taken: Mapping[str, torch.Tensor]) -> str:
    before = next((old for old, one in taken.items() if one is parameter), None)
    if before is not None:
        return f"it was {before} then"
    return "it was put in its place since" if name in taken else "there was none of that name"


def load(session: Session, name: str) -> torch.Tensor:
    """Of a parameter that tensor parallelism has split, this process's part."""
    if name in session.unmanaged.parameters:
        parameter = session.unmanaged.parameters[name].detach()
        master = session.unmanaged.master_of(name)
        if master is None:
            short = parameter.is_floating_point() and parameter.dtype.itemsize < 4
            return parameter.to("cpu", torch.float32 if short else None, copy=True)
        return master.cpu().clone().as_strided(parameter.shape, parameter.stride())
    member = session.data.member_of[name]
    return element_access.load_value(session.data, member, session.updates.kernels["host"])


def whole(session: Session, name: str, value: torch.Tensor) -> torch.Tensor:
    """A parameter's value as the module has it: around a part the DTensor that it is of."""
    if name in session.unmanaged.parameters:
        return value
    split = split_of(session.data.parameters[session.data.member_of[name]])
    return value if split is None else split.around(value)


def save(session: Session, name: str, value: torch.Tensor) -> None:
    """One that fits (`require`)."""
    if name in session.unmanaged.parameters:
        session.unmanaged.write(name, value)
        return
    member = session.data.member_of[name]
    place = session.data.places[member]
    value = part_like(value, session.data.parameters[member])
    laid = torch.empty_strided(place.shape, place.stride, dtype=torch.float32, device="cpu")
    store(session, member, dense(laid.copy_(value)))


def require(session: Session, name: str, value: torch.Tensor) -> None:
    """That it can be saved as the parameter's value: asked of all before the first is written."""
    if name in session.unmanaged.parameters:
        parameter = session.unmanaged.parameters[name]
        _require_tensor(name, value, parameter)
        _same_shape(name, value, tuple(parameter.shape))
        return
    member = session.data.member_of[name]
    _require_tensor(name, value, session.data.parameters[member])
    _same_shape(name, part_like(value, session.data.parameters[member]), session.data.places[member].shape)


def store(session: Session, member: int, flat: torch.Tensor, first: int = 0) -> None:
    """Writes elements of a managed parameter, in storage order; a device copy that is out of date by that goes."""
    element_access.store_value(session.data, member, flat, session.updates.kernels["host"], first)
    session.data.changed([member])
    index = session.data.places[member].chunk
    param = session.data.parameter_chunk(index)
    session.places.forget(index)
    session.places.refresh(index)
    if not param.device_valid:
        session.places.leave_stale(param)
    session.data.live.rebase()


def gradient(session: Session, name: str, loss_scale: float = 1.0) -> torch.Tensor | None:
    """The mean over all ranks, and over a step's micro-batches, of which some may not be there yet; ranks that share
    chunks call it together."""
    found = _held_outside(session, name) if name in session.unmanaged.parameters else _held(session, name)
    return None if found is None else found.div_(session.config.accumulate * session.pieces * loss_scale)


def _held_outside(session: Session, name: str) -> torch.Tensor | None:
    parameter = session.unmanaged.parameters[name]
    found = parameter.grad
    if session.sharing is not None:
        found = session.sharing.mean(parameter)
    return None if found is None else found.to("cpu", torch.float32, copy=True)


def _held(session: Session, name: str) -> torch.Tensor | None:
    member = session.data.member_of[name]
    updates = session.updates
    elsewhere = updates.shares is not None and member in updates.shares.everywhere
    if not updates.sink.arrived[member] and not elsewhere:
        return None
    if member in updates.sink.in_place:
        return updates.sink.in_place[member].to("cpu", torch.float32, copy=True)
    place, share = session.data.places[member], session.data.shares[member]
    flat = torch.empty(place.numel, device="cpu")
    if share.numel:
        chunk = session.store.chunks[
            "param" if member in updates.sink.parameter_space.members else "grad", place.chunk
        ]
        copy_out(session.store, chunk, share.offset, flat[share.first : share.first + share.numel])
    session.data.collect(member, flat)
    return flat.as_strided(place.shape, place.stride)


def state_dict(session: Session) -> dict[str, torch.Tensor]:
    """Every key that the module's own state_dict has; tied weights appear under each of their names."""
    names(session)
    first = {id(parameter): name for name, parameter in session.module.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    loaded: dict[str, torch.Tensor] = {}
    for name, parameter in session.module.named_parameters(remove_duplicate=False):
        owner = first[id(parameter)]
        if owner not in loaded:
            loaded[owner] = whole(session, owner, load(session, owner))
        found[name] = loaded[owner]
    for name, buffer in persistent_buffers(session.module, under_every_name=True):
        found[name] = buffer.detach().cpu().clone()
    return found


def load_state_dict(session: Session, state: Mapping[str, torch.Tensor]) -> None:
    """What there is of it."""
    given = _by_first_name(session, state)
    _require_shapes(session, given)
    for name in names(session):
        if name in given:
            save(session, name, given[name])
    for name, buffer in persistent_buffers(session.module, under_every_name=True):
        if name in given:
            buffer.copy_(given[name])


def compare_keys(session: Session, state: Mapping[str, torch.Tensor], strict: bool) -> _IncompatibleKeys:
    """What is missing and what is not known, before anything is written; of tied weights one name is enough unless
    `strict`."""
    expected = state_dict_keys(session.module)
    known, unexpected = set(expected), []
    for key in state:
        if key not in known:
            if strict:
                raise ConfigError(
                    f"state dict: unknown key {key!r}{nearest(key, expected)}; strict=False takes those that are known"
                )
            unexpected.append(key)
    there = state if strict else _by_first_name(session, state)
    first = {id(parameter): name for name, parameter in session.module.named_parameters()}
    owners = {n: first[id(p)] for n, p in session.module.named_parameters(remove_duplicate=False)}
    missing = [key for key in expected if key not in there and (strict or owners.get(key) not in there)]
    if missing and strict:
        raise ConfigError(
            f"state dict: {len(missing)} keys are missing, the first is {missing[0]!r}; strict=False leaves "
            "what is missing as it is"
        )
    return _IncompatibleKeys(missing, unexpected)


def _by_first_name(session: Session, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With tied weights under the name that they have here, whichever of theirs was given."""
    found = dict(state)
    first = {id(parameter): name for name, parameter in session.module.named_parameters()}
    for name, parameter in session.module.named_parameters(remove_duplicate=False):
        if name in state:
            found.setdefault(first[id(parameter)], state[name])
    return found


def _require_shapes(session: Session, state: Mapping[str, torch.Tensor]) -> None:
    """Before anything is written."""
    for name in names(session):
        if name in state:
            require(session, name, state[name])
    for name, buffer in persistent_buffers(session.module, under_every_name=True):
        if name not in state:
            continue
        _require_tensor(name, state[name], buffer)
        _same_shape(name, state[name], tuple(buffer.shape))


def state_dict_keys(module: nn.Module) -> list[str]:
    keys = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return keys + [name for name, _ in persistent_buffers(module, under_every_name=True)]


def persistent_buffers(module: nn.Module, under_every_name: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Buffers that the module's state_dict has: there they are under every name of a module that has several."""
    return [
        (f"{prefix}.{key}" if prefix else key, buffer)
        for prefix, child in module.named_modules(remove_duplicate=not under_every_name)
        for key, buffer in child._buffers.items()
        if buffer is not None and key not in child._non_persistent_buffers_set
    ]


def warn_of_extra_state(module: nn.Module) -> None:
    """What torch's state_dict takes from `get_extra_state` may be anything at all."""
    odd = [
        f"the module {name!r}" if name else "the module"
        for name, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    ]
    if odd:
        more = f" (and {len(odd) - 1} more)" if odd[1:] else ""
        warn_user(
            f"{odd[0]}{more} has a get_extra_state(), which the engine does not save: give what it returns to "
            "engine.save(folder, state), and to set_extra_state() after engine.load(folder)"
        )


def _require_tensor(name: str, value: object, like: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name}: expected a tensor, found {type(value).__name__}; nothing was written")
    found = "on the meta device" if value.is_meta else f"with layout {value.layout}"
    if value.is_meta or value.layout != torch.strided:
        raise ConfigError(
            f"{name}: expected a dense tensor with values, found one {found}; nothing was written"
        )
    if value.is_complex() and not like.is_complex():
        raise ConfigError(f"{name}: expected {like.dtype} numbers, found {value.dtype}; nothing was written")


def _same_shape(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ConfigError(f"{name}: expected shape {shape}, found {tuple(value.shape)}; nothing was written")
