"""What lies beside the chunks: buffers, parameters outside of them, and optimizers of torch's."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ebbtide
from ebbtide.errors import BudgetError, ConfigError, NonFiniteError, UnsupportedError
from ebbtide.memory.budget import AVERAGE
from ebbtide.runtime.updates.loss_scale import LEAST
from harness import config_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean()


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(2, 8, dtype=dtype)


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=4096, **sizes))


def test_buffers_of_a_model_that_is_in_its_precision_keep_their_own(tmp_path: Path) -> None:
    """Rotary frequencies of a Llama in bf16 are fp32, and stay so: rounded, positions in the thousands would be off."""
    llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = model.model.rotary_emb.inv_freq.clone()
    assert before.dtype == torch.float32
    engine = ebbtide.initialize(model, config_of(precision="bf16"))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(engine.release().model.rotary_emb.inv_freq, before)


def test_buffers_that_were_rounded_come_back_as_they_were_unless_they_were_written() -> None:
    net = Net()
    net.register_buffer("scale", torch.tensor([1 / 3, 2 / 3]))
    net.register_buffer("count", torch.tensor([1 / 3]))
    before = copy.deepcopy(dict(net.named_buffers()))
    engine = ebbtide.initialize(net, config_of(precision="bf16"))
    assert net.scale.dtype == torch.bfloat16  # as by module.to(torch.bfloat16)
    net.count.fill_(2.0)
    engine.release()
    assert torch.equal(net.scale, before["scale"]) and net.count.dtype == torch.float32 and net.count == 2


@pytest.mark.parametrize("write", ["data", "resident"])
def test_what_is_written_through_data_outside_the_chunks_counts(write: str) -> None:
    net = Net()
    engine = ebbtide.initialize(net, config_of(precision="bf16", unmanaged=["head.*"]))
    engine.backward(engine(batch(torch.bfloat16)))
    engine.step()
    if write == "data":
        net.head.weight.data.mul_(0)
    else:
        with engine.resident(write=True):
            net.head.weight.data.mul_(0)
    with engine.weights("head.weight") as found:
        assert not found["head.weight"].any()
    assert not engine.state_dict()["head.weight"].any()
    engine.close()


def test_another_optimizer_over_the_engines_parameters_outside_the_chunks_is_refused() -> None:
    net = Net()
    engine = ebbtide.initialize(net, config_of(precision="fp32", unmanaged=["head.*"]))
    other = torch.optim.SGD(net.head.parameters(), lr=0.1)
    engine.backward(engine(batch()))
    with pytest.raises(UnsupportedError, match="would update them a second time: give initialize"):
        other.step()
    engine.step()
    engine.release()
    other.step()  # there is no engine any more


def test_one_over_parameters_that_no_group_has_trains_them_as_plain_pytorch_does() -> None:
    found = []
    for ours in (True, False):
        net = Net()
        body, other = list(net.body.parameters()), torch.optim.SGD(net.head.parameters(), lr=0.1)
        settings = config_of(precision="fp32", unmanaged=["head.*"], optimizer={"lr": 0.0})
        engine = ebbtide.initialize(net, settings, body) if ours else None
        for _ in range(3):
            loss = net(batch())
            loss.backward()
            other.step()
            if engine is not None:
                engine.step()
            net.zero_grad()
        found.append(net.head.weight.detach().clone())
    assert torch.equal(*found)


def test_an_optimizer_that_was_handed_over_is_free_again_with_its_engine() -> None:
    net = Net()
    given = torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)
    groups = given.param_groups
    with pytest.raises(BudgetError):
        ebbtide.initialize(net, config_of(precision="fp32", device={"memory": 16}, host={"memory": 0}), given)
    assert given.param_groups is groups and groups[0]["decoupled_weight_decay"]
    engine = ebbtide.initialize(net, config_of(precision="fp32"), given)
    assert engine.config.optimizer.name == "adamw"
    given.param_groups[0]["lr"] = 0.2
    engine.backward(engine(batch()))
    engine.step()
    with pytest.raises(UnsupportedError, match="handed over"):
        given.step()
    saved = torch.optim.Adam(Net().parameters(), lr=0.3, weight_decay=0.1, decoupled_weight_decay=True)
    net = engine.release()
    assert given.param_groups is groups and groups[0]["decoupled_weight_decay"] and groups[0]["lr"] == 0.2
    net(batch()).backward()
    given.step()
    given.load_state_dict(saved.state_dict())
    assert given.param_groups[0]["lr"] == 0.3


def test_moments_that_are_loaded_reach_the_second_engine_of_an_optimizer() -> None:
    plain = Net()
    trained = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(batch()).backward()
    trained.step()
    net = Net()
    given = torch.optim.AdamW(net.parameters(), lr=0.1)
    ebbtide.initialize(net, config_of(precision="fp32"), given).release()
    engine = ebbtide.initialize(net, config_of(precision="fp32"), given)
    given.load_state_dict(trained.state_dict())
    assert engine.steps == 1
    engine.close()


def test_a_scale_that_cannot_be_lowered_stops_the_run() -> None:
    """fp16: gradients that overflow whatever the scale, as those of a weight that is not finite."""
    net = Net()
    engine = ebbtide.initialize(net, config_of(precision="fp16", clip=None))
    engine.backward(
        engine(batch(torch.float16)).float() * 2.0**20
    )  # a large loss, which a small scale serves
    engine.step()
    steps = 0
    while not engine.steps:
        engine.backward(engine(batch(torch.float16)).float() * 2.0**20)
        engine.step()
        steps += 1
        assert steps < 40
    assert LEAST <= engine.loss_scale < 1.0
    sha = engine.weights_sha256()
    with pytest.raises(NonFiniteError, match=r"all steps since it was larger were skipped"):
        for _ in range(40):
            engine.backward(engine(batch(torch.float16)).float() * float("inf"))
            engine.step()
    assert engine.weights_sha256() == sha
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_takes_an_export_in_the_dtype_that_it_is_in(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = llama().to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
    model.config.dtype = own = model.dtype
    engine = ebbtide.initialize(model, config_of(precision="bf16"))
    engine.export(tmp_path, dtype)
    assert model.config.dtype == own  # the user's own is left alone
    engine.close()
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read.dtype == dtype


def half_frozen() -> tuple[Net, ebbtide.Engine]:
    net = Net()
    net.head.requires_grad_(False)
    return net, ebbtide.initialize(net, config_of(precision="bf16", clip=None), list(net.parameters()))


def averaged_step(engine: ebbtide.Engine, expected: dict[str, torch.Tensor]) -> None:
    engine.backward(engine(batch(torch.bfloat16)))
    engine.step()
    for name, value in engine.state_dict().items():
        expected[name] = expected[name] + (value - expected[name]) * 0.5


def test_an_average_takes_in_what_is_unfrozen_later(tmp_path: Path) -> None:
    net, engine = half_frozen()
    average, expected = engine.ema(0.5), engine.state_dict()
    averaged_step(engine, expected)
    engine.save(tmp_path / "frozen")
    net.head.requires_grad_(True)
    averaged_step(engine, expected)
    averaged_step(engine, expected)
    found = average.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    engine.save(tmp_path / "unfrozen")
    averaged_step(engine, expected)
    engine.load(tmp_path / "unfrozen")
    assert all(torch.equal(found[name], value) for name, value in average.state_dict().items())
    engine.load(tmp_path / "frozen")  # a head that was never trained is its own average
    assert torch.equal(average.state_dict()["head.weight"], engine.state_dict()["head.weight"])
    assert not torch.equal(average.state_dict()["body.weight"], engine.state_dict()["body.weight"])
    engine.close()
    other, second = half_frozen()
    average = second.ema(0.5)
    second.load(tmp_path / "unfrozen")
    assert all(torch.equal(found[name], value) for name, value in average.state_dict().items())
    other.head.requires_grad_(True)
    second.close()


def test_an_average_that_an_interrupt_met_takes_each_weight_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ebbtide.initialize(Net(), config_of(precision="fp32", clip=None))
    average, expected = engine.ema(0.5), engine.state_dict()
    real = torch.Tensor.copy_
    for left in range(8):
        calls = iter(range(1000))

        def copy(self: torch.Tensor, *args: Any, calls: Any = calls, left: int = left) -> torch.Tensor:
            found = real(self, *args)
            if next(calls) == left:
                raise KeyboardInterrupt
            return found

        engine.backward(engine(batch()))
        engine.step()
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(torch.Tensor, "copy_", copy)
            average.catch_up()
        for name, value in engine.state_dict().items():
            expected[name] = expected[name] + (value - expected[name]) * 0.5
        found = average.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    engine.close()


def test_a_decay_that_is_none_is_refused_when_it_is_set() -> None:
    engine = ebbtide.initialize(Net(), config_of(precision="fp32"))
    average = engine.ema(0.5)
    with pytest.raises(ConfigError, match="a decay from 0 to 1"):
        average.decay = 5.0
    average.decay = 0.75
    engine.close()


def test_an_average_that_widens_keeps_right_books(monkeypatch: pytest.MonkeyPatch) -> None:
    net, engine = half_frozen()
    average = engine.ema(0.5)
    averaged_step(engine, engine.state_dict())

    def held() -> int:
        return sum(tags[AVERAGE] for tags in engine._session.ledger.tags.values())

    before = held()
    net.head.requires_grad_(True)
    with monkeypatch.context() as patched:
        patched.setattr(type(average._kept[0]), "begin", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine(batch(torch.bfloat16))
            assert held() == before
    averaged_step(engine, engine.state_dict())
    assert held() == 2 * before == 2 * 4 * 72
    engine.close()


def test_what_is_frozen_and_unfrozen_outside_the_chunks_leaves_nothing_behind() -> None:
    net = Net()
    config = config_of(precision="bf16", clip=None, unmanaged=["head.*"])
    engine = ebbtide.initialize(net, config, list(net.parameters()))
    average = engine.ema(0.5)
    for number in range(6):
        net.head.requires_grad_(number % 2 == 0)
        averaged_step(engine, engine.state_dict())
    assert len(average._reserved) == 1
    engine.close()


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("updates", ["exact", "in-backward"])
def test_an_optimizer_of_torchs_has_its_own_gradients_outside_the_chunks(first: str, updates: str) -> None:
    """The engine's step dropped them, and they counted in its clip."""

    def trained(engine: ebbtide.Engine | None, net: Net) -> dict[str, torch.Tensor]:
        own = torch.optim.SGD(net.head.parameters(), lr=0.1)
        plain = torch.optim.AdamW(net.body.parameters(), lr=1e-3)
        for number in range(3):
            loss = (net if engine is None else engine)(batch() * (number + 1))
            if engine is None:
                loss.backward()
                if updates == "exact":
                    torch.nn.utils.clip_grad_norm_(net.body.parameters(), 0.5)
                plain.step()
            else:
                engine.backward(loss)
            for step in (own.step, engine.step if engine else plain.zero_grad)[
                :: 1 if first == "theirs" else -1
            ]:
                step()
            assert net.head.weight.grad is not None
            own.zero_grad()
            assert net.head.weight.grad is None
        return {} if engine else {name: p.detach().clone() for name, p in net.named_parameters()}

    net = Net()
    plain = trained(None, net)
    net = Net()
    settings = config_of(
        precision="fp32", unmanaged=["head.*"], updates=updates, clip=0.5 if updates == "exact" else None
    )
    engine = ebbtide.initialize(net, settings, param_groups=[{"params": list(net.body.parameters())}])
    trained(engine, net)
    found = engine.state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    engine.close()


def test_zero_grad_of_the_engine_drops_what_another_optimizer_has_too() -> None:
    """As `module.zero_grad()` does; `engine.optimizer.zero_grad()` leaves it."""
    net = Net()
    engine = ebbtide.initialize(
        net,
        config_of(precision="fp32", unmanaged=["head.*"]),
        param_groups=[{"params": list(net.body.parameters())}],
    )
    engine.backward(engine(batch()))
    engine.optimizer.zero_grad()
    assert net.head.weight.grad is not None
    engine.zero_grad()
    assert net.head.weight.grad is None
    engine.close()
