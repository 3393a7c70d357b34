"""The user's module keeps its contract: its `state_dict()` gives real weights, or raises, never placeholders."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from ebbtide.errors import UnsupportedError
from ebbtide.run.session import Session
from ebbtide.state import values


def guard(session: Session) -> None:
    """Hooks on every module that owns managed parameters; removed with the interceptor's."""
    member_of = {id(p): i for i, p in enumerate(session.data.parameters)}

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        session.reclaim()
        for name, parameter in module._parameters.items():
            member = member_of.get(id(parameter))
            if member is not None and prefix + name in state:
                value = values.load(session, session.data.names[member])
                dtype = session.data.parameter_chunk(session.data.places[member].chunk).dtype
                exact = value if dtype == torch.float32 else _rounded(session, value, dtype)
                state[prefix + name] = exact

    def refuse(module: nn.Module, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "load_state_dict() of a managed module would write into placeholders; use engine.load_state_dict()"
        )

    for module in session.module.modules():
        if any(id(p) in member_of for p in module._parameters.values()):
            session.interceptor.keep(module.register_state_dict_post_hook(fill))
            session.interceptor.keep(module.register_load_state_dict_pre_hook(refuse))


def _rounded(session: Session, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The parameter that a master stands for."""
    flat = value.as_strided((value.numel(),), (1,))
    out = torch.empty_like(flat, dtype=dtype)
    session.updates.kernels["host"].split(flat, out, flat)
    return out.as_strided(value.shape, value.stride())
