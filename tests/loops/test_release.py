"""engine.release(): the module is an ordinary one again, with the weights that the engine had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import Engine
from ebbtide.errors import BudgetError, ConfigError, StateError
from group import group_of

CPU = {"kind": "cpu", "memory": "1GB"}


def batches(count: int, start: int = 0) -> list[torch.Tensor]:
    return [
        torch.randn(4, 16, generator=torch.Generator().manual_seed(start + place)) for place in range(count)
    ]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 16)).to(dtype)


def engine_of(module: nn.Module, **settings: Any) -> Engine:
    return ebbtide.initialize(module, {"precision": "fp32", "device": CPU, **settings})


def trained(engine: Engine, count: int = 3) -> Engine:
    for x in batches(count):
        engine.backward(engine(x).square().mean())
        engine.step()
    return engine


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(
        torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine
    )


PLACES: list[dict[str, Any]] = [
    {},
    {"chunk_size": 4096, "host": {"memory": 0}},
    {"unmanaged": ["3.*"]},
    {"updates": "lock-free"},
]


@pytest.mark.parametrize("place", PLACES, ids=["roomy", "chunks", "unmanaged", "lock-free"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_trains_on_without_an_engine(place: dict[str, Any], dtype: torch.dtype) -> None:
    engine = trained(engine_of(net(dtype), **place))
    weights = {name: value.to(dtype) for name, value in engine.state_dict().items() if "running" not in name}
    module = engine.release()
    found = module.state_dict()
    assert all(torch.equal(found[name], weights[name]) for name, _ in module.named_parameters())
    assert all(type(p) is nn.Parameter and p.dtype == dtype and p.grad is None for p in module.parameters())
    twin = net(dtype)
    twin.load_state_dict(found)
    for one in (module, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for x in batches(3, start=9):
            optimizer.zero_grad()
            one(x.to(dtype)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
    assert same(module, twin)


def test_another_engine_takes_it() -> None:
    engine = trained(engine_of(net()))
    with pytest.raises(ConfigError, match=r"call its release\(\) first"):
        engine_of(engine.module)
    again = engine_of(engine.release())
    twin = net()
    twin.load_state_dict(again.state_dict())
    other = engine_of(twin)
    assert trained(again).weights_sha256() == trained(other).weights_sha256()
    with pytest.raises(StateError, match="closed"):
        engine.release()
    engine.close()  # changes nothing
    assert again.module.state_dict()


def test_a_module_from_the_meta_device_has_memory_of_its_own() -> None:
    with torch.device("meta"):
        module = net()
    engine = trained(engine_of(module))
    weights = engine.state_dict()
    parameters = list(module.parameters())
    engine.release()
    assert all(p.device.type == "cpu" for p in module.parameters())
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    assert all(torch.equal(module.state_dict()[name], value) for name, value in weights.items())


def test_a_module_that_was_changed_meanwhile_is_refused_by_name() -> None:
    engine = trained(engine_of(net()))
    engine.module.add_module("late", nn.Linear(2, 2))
    with pytest.raises(StateError, match=r"another late\.weight than when the engine took it over"):
        engine.release()
    del engine.module.late
    assert engine.release().state_dict()


def test_tied_weights_stay_tied() -> None:
    first = nn.Linear(16, 16, bias=False)
    second = nn.Linear(16, 16, bias=False)
    second.weight = first.weight
    module = trained(engine_of(nn.Sequential(first, second))).release()
    assert module[0].weight is module[1].weight  # type: ignore[index]
    module(batches(1)[0]).sum().backward()
    assert first.weight.grad is not None


def test_what_was_interrupted_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained(engine_of(net(), chunk_size=4096))
    weights = engine.state_dict()
    give, calls = engine._session.data.give_memory, []

    def once(member: int, value: torch.Tensor) -> None:
        calls.append(member)
        if len(calls) == 2:
            raise KeyboardInterrupt
        give(member, value)

    monkeypatch.setattr(engine._session.data, "give_memory", once)
    with pytest.raises(KeyboardInterrupt):
        engine.release()
    engine.close()
    assert all(torch.equal(engine.module.state_dict()[name], value) for name, value in weights.items())


def test_ram_that_is_not_there_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained(engine_of(net()))
    twin = trained(engine_of(net()))
    with monkeypatch.context() as patched:
        patched.setattr(type(engine._tiers.backend), "available", lambda _: {"device": 1, "host": 1})
        with pytest.raises(
            BudgetError, match=r"release: the module's own weights take .* of this machine's RAM"
        ):
            engine.release()
    assert trained(engine, 5).weights_sha256() == trained(twin, 5).weights_sha256()


def on_ranks() -> bool:
    engine = trained(engine_of(net(), chunk_size=4096))
    weights = engine.state_dict()
    module = engine.release()
    return all(torch.equal(module.state_dict()[name], value) for name, value in weights.items())


def test_all_ranks_have_all_of_it() -> None:
    assert group_of(2).run(on_ranks) == [True, True]


def test_where_resident_has_no_room_all_that_is_short_and_release_are_named() -> None:
    def deep(memory: int) -> Engine:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64) for _ in range(8)]
        device = {"kind": "cpu", "memory": memory}
        return engine_of(nn.Sequential(*layers), chunk_size="16KiB", device=device, host={"memory": "16MB"})

    engine = deep(80_000)
    loss = engine(torch.ones(2, 64)).square().mean()
    engine.backward(loss)
    engine.step()
    with pytest.raises(BudgetError, match=r"release\(\)") as refused, engine.resident():
        pass
    module = engine.release()  # what was tried has left nothing behind
    assert module(torch.ones(2, 64)).isfinite().all()
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert weights <= 80_000 + refused.value.short <= 2 * weights
    enough = deep(80_000 + refused.value.short)
    enough.backward(enough(torch.ones(2, 64)).square().mean())
    enough.step()
    with enough.resident():  # optimizer state leaves the device for it
        assert all(parameter.isfinite().all() for parameter in enough.module.parameters())
    enough.close()
