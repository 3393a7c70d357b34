"""What a user relies on beside the numbers: contracts of PyTorch, faults, values by name."""

from __future__ import annotations

import copy
import gc
import math
import re
import threading
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
import reference
import zoo
from ebbtide.devices import cpu_device
from ebbtide.devices.pool import in_pool
from ebbtide.errors import BudgetError, ConfigError, NonFiniteError, StateError, UnsupportedError
from ebbtide.tracing.hooks.saved_tensors import end_regions
from harness import batch_of, config_of
from sampling import crossed

TIGHT = {"device": {"memory": 1_400_000}}


@pytest.fixture
def make() -> Any:
    engines: list[ebbtide.Engine] = []

    def build(name: str = "gpt2", groups: Any = None, **changes: Any) -> ebbtide.Engine:
        model = zoo.build(name) if isinstance(name, str) else name
        engines.append(ebbtide.initialize(model, config_of(**changes), groups))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def step(engine: ebbtide.Engine, number: int = 0, name: str = "gpt2") -> Any:
    loss = engine(**zoo.ZOO[name].batch(number)).loss
    engine.backward(loss)
    return engine.step()


@pytest.mark.parametrize(
    "changes",
    [{}, {"updates": "in-backward", "offload_activations": "all", "clip": None}, {"updates": "lock-free"}],
    ids=["held", "in-backward", "lock-free"],
)
def test_an_engine_that_is_closed_leaves_no_thread_and_no_memory(
    changes: dict[str, Any], folder: Path
) -> None:
    ssd = {"host": {"memory": 2_500_000}, "ssd": {"folder": folder, "memory": 8_000_000}}

    gc.collect()  # engines that other tests left
    before = threading.enumerate()  # of other engines, some of which may end meanwhile
    for _ in range(2):
        engine = ebbtide.initialize(zoo.build("gpt2"), config_of(**TIGHT, **ssd, **changes))
        for number in range(2):
            step(engine, number)
        assert engine.stats()["moved_bytes"]["ssd_write"] > 0
        engine.close()
        ours = [one for one in threading.enumerate() if one not in before]
        for one in ours:
            one.join(60)  # one that has said that it is over may still be on its way out
        assert not [one.name for one in ours if one.is_alive()]
        assert in_pool().kept == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_precisions_that_the_processor_does_not_multiply_are_named(
    make: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cpu_device._ASKED.values():
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(precision=precision)
    said = [str(one.message) for one in caught if str(one.message).startswith("precision")]
    if precision == "fp32":
        assert not said
    else:
        assert len(said) == 1
        assert {"bf16": "bfloat16", "fp16": "float16"}[precision] in said[0]
        assert 'precision = "fp32"' in said[0]


def test_interleaved_evaluation_and_values_change_nothing(make: Any) -> None:
    plain, looked = make(**TIGHT), None
    for number in range(4):
        step(plain, number)
    expected = plain.weights_sha256()
    plain.close()
    looked = make(**TIGHT)
    for number in range(4):
        loss = looked(**zoo.ZOO["gpt2"].batch(number)).loss
        looked.module.eval()
        with torch.no_grad():
            looked(**zoo.ZOO["gpt2"].batch(50))
        looked.module.train()
        looked.backward(loss)
        with looked.gradients("*ln_f*") as gradients:
            assert all(g.abs().sum() > 0 for g in gradients.values())
        with torch.no_grad():
            looked.module(**zoo.ZOO["gpt2"].batch(51))
        looked.state_dict()
        looked.step()
        with looked.weights("transformer.wte.weight") as weights:
            assert not weights["transformer.wte.weight"].isnan().any()
    assert looked.weights_sha256() == expected


@pytest.mark.parametrize("master", ["split", "separate"])
def test_values_between_backward_and_step(make: Any, master: str) -> None:
    engine = make(master=master, **TIGHT)
    before = engine.state_dict()
    step(engine)
    first = engine.weights_sha256()
    engine.load_state_dict(before)
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(1)).loss)
    now = engine.state_dict()
    assert all(torch.equal(before[key], now[key]) for key in before)
    with torch.no_grad():
        assert math.isfinite(float(engine(**zoo.ZOO["gpt2"].batch(2)).loss))
    engine.step()
    assert engine.weights_sha256() != first


def test_module_state_dict_is_real(make: Any) -> None:
    engine = make(**TIGHT)
    step(engine)
    real = engine.state_dict()
    for key, value in engine.module.state_dict().items():
        assert not value.isnan().any(), key
        assert torch.equal(value, reference.to_parameter(real[key], torch.bfloat16)), key
    part = engine.module.transformer.h[1].state_dict()
    assert not part["ln_1.weight"].isnan().any()
    with pytest.raises(UnsupportedError, match=r"engine\.load_state_dict"):
        engine.module.load_state_dict(real)
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(engine.module)


def test_write_weights(make: Any) -> None:
    engine = make(**TIGHT)
    step(engine)
    with engine.weights("transformer.ln_f.*", write=True) as weights:
        for value in weights.values():
            value.fill_(0.5)
    assert torch.equal(engine.state_dict()["transformer.ln_f.weight"], torch.full((64,), 0.5))
    with torch.no_grad():
        out = engine(**zoo.ZOO["gpt2"].batch(0))
    assert torch.isfinite(out.loss)
    with (
        pytest.raises(ConfigError, match=r"matches no parameter; did you mean 'transformer.ln_f.weight'"),
        engine.weights("transformer.lnf.weight"),
    ):
        pass


def test_generate_while_resident(make: Any) -> None:
    engine = make(device={"memory": 3_000_000})
    step(engine)
    free = engine.module.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    with engine.resident():
        moved = dict(engine.stats()["moved_bytes"])
        held = engine.module.generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert engine.stats()["moved_bytes"] == moved
    assert torch.equal(free, held)
    step(engine, 1)
    engine.check_integrity()


def test_groups_and_schedules(make: Any) -> None:
    """Per-group settings, a scheduler, and a group added later, against torch's AdamW in fp32."""
    model, plain = zoo.build("gpt2"), zoo.build("gpt2")

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in of.parameters() if p.dim() > 1]
        others = [p for p in of.parameters() if p.dim() <= 1]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]

    engine = make(model, groups(model), precision="fp32", clip=0.5, device={"memory": 2_400_000})
    optimizer = torch.optim.AdamW(groups(plain), lr=1e-3)
    ours = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            step(engine, number)
            ours.step()
    for number in range(4):
        plain(**zoo.ZOO["gpt2"].batch(number)).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        theirs.step()
    state = engine.state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=2e-4, atol=2e-6)


def test_frozen_unused_and_unfrozen(make: Any) -> None:
    model = zoo.build("gpt2")
    model.extra = nn.Linear(64, 64)
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad = False
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine = make(model, [{"params": list(model.parameters())}], **TIGHT)
    for number in range(3):
        step(engine, number)
    state = engine.state_dict()
    for name in ("transformer.h.0.ln_1.weight", "transformer.h.0.mlp.c_fc.weight"):
        value = before[name]
        assert torch.equal(state[name], reference.to_parameter(value, torch.bfloat16).float()), name
    assert torch.equal(state["extra.weight"], before["extra.weight"])
    assert not torch.equal(state["transformer.h.1.ln_1.weight"], before["transformer.h.1.ln_1.weight"])
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad = True
    step(engine, 3)
    assert not torch.equal(
        engine.state_dict()["transformer.h.0.mlp.c_fc.weight"], state["transformer.h.0.mlp.c_fc.weight"]
    )


def test_changed_shape_is_traced_again(make: Any) -> None:
    def go(memory: Any) -> str:
        engine = make(device={"memory": memory})
        for number in range(6):
            ids = zoo._tokens(512, number, length=32 if number % 3 else 16)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            engine.check_integrity()
        sha = engine.weights_sha256()
        engine.close()
        return sha

    assert go(1_400_000) == go("auto")


class Branching(nn.Module):
    """Uses some layers only sometimes, decided by a Python value that is not in the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.skip = -1

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                x = torch.relu(layer(x))
        return {"loss": x.float().pow(2).mean()}


def test_leaving_the_trace_stays_right(make: Any) -> None:
    def go(**changes: Any) -> tuple[str, dict[str, Any]]:
        engine = make(Branching(), chunk_size="8KiB", **changes)
        diverged = 0
        for number in range(10):
            engine.module.skip = number % 4 if number > 3 else -1
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number), dtype=torch.bfloat16)
            loss = engine(x)["loss"]
            engine.backward(loss)
            engine.step()
            diverged += bool(engine.stats()["diverged"])
            engine.check_integrity()
        sha, stats = engine.weights_sha256(), engine.stats()
        engine.close()
        return sha, {**stats, "count": diverged}

    free, _ = go()
    tight, stats = go(device={"memory": 45_000})
    assert tight == free
    assert stats["count"] > 0 and stats["traces"] > 2


def test_exceptions_leave_the_engine_usable(make: Any) -> None:
    engine = make(**TIGHT)
    step(engine, 0)
    with pytest.raises((RuntimeError, IndexError)):
        engine(input_ids=torch.full((2, 8), 100_000), labels=torch.zeros(2, 8, dtype=torch.long))
    loss = engine(**zoo.ZOO["gpt2"].batch(1)).loss
    hook = engine.module.transformer.h[1].register_full_backward_hook(_raise)
    hook.remove()

    handle = engine.module.transformer.h[2].mlp.register_forward_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        engine(**zoo.ZOO["gpt2"].batch(1))
    handle.remove()
    engine.backward(loss)
    engine.step()
    engine.check_integrity()
    broken = engine(**zoo.ZOO["gpt2"].batch(2)).loss
    broken = broken + _Explode.apply(broken)
    with pytest.raises(ZeroDivisionError):
        engine.backward(broken)
    step(engine, 2)
    engine.check_integrity()


def test_a_region_that_an_exception_has_left_is_ended_with_its_pass(make: Any) -> None:
    """Else its pair of hooks, and ours below it, stay for all passes that follow: they would save weights themselves.
    Before 2.13 torch leaves that to the collector."""
    engine = make(zoo.build("gpt2", "non-reentrant"), **TIGHT)
    handle = engine.module.transformer.h[1].mlp.register_forward_hook(_raise)
    with pytest.raises(ZeroDivisionError) as held:
        engine(**zoo.ZOO["gpt2"].batch(0))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert held.value is not None
    handle.remove()
    for number in range(2):
        step(engine, number)
    assert not engine.stats()["diverged"]
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_regions_that_an_error_of_an_error_has_left_are_ended() -> None:
    """As torch before 2.13 leaves them: generators that wait, in frames of its own."""
    source = "def region(pairs, run):\n    waiting = pairs()\n    next(waiting)\n    run()\n"
    scope: dict[str, Any] = {}
    exec(compile(source, torch.utils.checkpoint.__file__, "exec"), scope)
    ended: list[str] = []

    def pairs(name: str) -> Any:
        try:
            yield
        finally:
            ended.append(name)
            if name == "inner":
                raise ValueError("an end that fails")

    def inner() -> None:
        scope["region"](lambda: pairs("inner"), lambda: _raise())

    def outer() -> None:
        try:
            scope["region"](lambda: pairs("outer"), inner)
        except ZeroDivisionError as error:
            raise KeyError("another") from error

    with pytest.raises(KeyError) as found:
        outer()
    assert not ended
    end_regions(found.value)
    assert ended == ["inner", "outer"]


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("on purpose")


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ZeroDivisionError("on purpose")


def test_in_backward_exception_is_marked(make: Any) -> None:
    engine = make(updates="in-backward", clip=None)
    step(engine, 0)
    saved = engine.state_dict()
    engine.module.transformer.wte.register_full_backward_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine(**zoo.ZOO["gpt2"].batch(1)).loss)
    with pytest.raises(StateError, match="partially stepped"):
        engine(**zoo.ZOO["gpt2"].batch(1))
    engine.load_state_dict(saved)
    engine(**zoo.ZOO["gpt2"].batch(1))


def test_refusals(make: Any) -> None:
    engine = make(**TIGHT)
    with pytest.raises(StateError, match="without a backward"):
        engine.step()
    loss = engine(**zoo.ZOO["gpt2"].batch(0)).loss
    engine.backward(loss)
    with pytest.raises(UnsupportedError, match="second backward"):
        engine.backward(loss)
    with pytest.raises(ConfigError, match="one element"):
        engine.backward(torch.ones(3, requires_grad=True) * 2)
    with pytest.raises(ConfigError, match="does not depend"):
        engine.backward(torch.zeros(()))
    engine.step()
    with pytest.raises(ConfigError, match="unknown setting 'weight_decai'; did you mean 'weight_decay'"):
        make(Branching(), [{"params": [], "weight_decai": 1}])
    with pytest.raises(UnsupportedError, match="fp16"):
        make(precision="fp16", updates="in-backward", clip=None)
    double = nn.Linear(4, 4).double()
    with pytest.raises(UnsupportedError, match=r"weight is trained in torch\.float64"):
        make(double)


def test_too_little_memory_is_said_at_initialize(make: Any) -> None:
    with pytest.raises(BudgetError, match=r"model data of .* does not fit") as caught:
        make(device={"memory": 500_000}, host={"memory": 500_000})
    assert caught.value.short > 0


def test_too_little_for_activations_is_said_before_any_operator(make: Any) -> None:
    engine = make(device={"memory": 300_000})
    calls: list[int] = []
    engine.module.transformer.drop.register_forward_pre_hook(
        lambda *_: (
            calls.append(1) if not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) else None
        )
    )
    with pytest.raises(BudgetError, match=r"needs at least .* raise device\.memory to") as caught:
        engine(**zoo.ZOO["gpt2"].batch(0))
    assert not calls
    assert caught.value.tier == "device" and caught.value.short > 0


class Chain(nn.Module):
    """Layers of which some are much wider, and activations beside which the largest layer is small: for the bytes of all
    rows, products of an eighth of them."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 512, 256, 512, 64, 64]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x[::8]).relu().repeat(8, 1)
        return x.float().square().mean()


def steps_of_chain(settings: dict[str, Any], rows: int) -> None:
    engine = ebbtide.initialize(Chain(), config_of(**settings))
    try:
        for _ in range(3):
            engine.backward(engine(torch.ones(rows, 64, dtype=torch.bfloat16)))
            engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("device", "host", "rows", "hosted", "changes"),
    crossed(
        [
            pytest.param(6_000_000, 0, 2000, id="one tier"),
            pytest.param(8_000_000, 0, 2000, id="one tier, more"),
            pytest.param(600_000, 5_000_000, 2000, id="device"),
            pytest.param(1_200_000, 5_000_000, 2000, id="more device"),
            pytest.param(1_900_000, 3_800_000, 416, id="host"),
        ],
        [pytest.param([], id=""), pytest.param(["layers.0"], id="host modules")],
        [
            pytest.param({}, id="exact"),
            pytest.param({"master": "separate"}, id="separate"),
            pytest.param({"updates": "in-backward", "clip": None}, id="in-backward"),
        ],
    ),
)
def test_following_a_refusals_advice_once_is_enough(
    device: int, host: int, rows: int, hosted: list[str], changes: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"device": {"memory": device}, "host": {"memory": host}, **changes}
    settings["host_modules"] = hosted
    with pytest.raises(BudgetError) as caught:
        steps_of_chain(settings, rows)
    advised = re.findall(r"(\w+)\.memory to (\d+) bytes", caught.value.advice)
    assert advised, caught.value
    for tier, count in advised:
        assert int(count) > settings[tier]["memory"]
        settings[tier] = {"memory": int(count)}
    steps_of_chain(settings, rows)


@pytest.mark.parametrize("nonfinite", ["stop", "continue"])
def test_nonfinite_loss(make: Any, nonfinite: str) -> None:
    engine = make(nonfinite=nonfinite, **TIGHT)
    step(engine, 0)
    before = engine.weights_sha256()
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(1)).loss * float("nan"))
    if nonfinite == "stop":
        with pytest.raises(NonFiniteError, match="step 2: the loss is nan"):
            engine.step()
    else:
        assert engine.step().skipped
    assert engine.weights_sha256() == before
    step(engine, 2)
    assert engine.weights_sha256() != before


def test_a_loss_that_is_refused_ends_its_pass(make: Any) -> None:
    """Before anything is updated in backward; the next pass is the first again."""
    shas = []
    for refused in (True, False):
        engine = make(updates="in-backward", clip=None, **TIGHT)
        step(engine, 0)
        if refused:
            with pytest.raises(NonFiniteError, match="step 2: the loss is nan; nothing was updated"):
                engine.backward(engine(**zoo.ZOO["gpt2"].batch(1)).loss * float("nan"))
            assert engine._session.idle
        step(engine, 2)
        shas.append(engine.weights_sha256())
        assert engine.stats()["diverged"] == ""
    assert shas[0] == shas[1]


def test_fp16_scaling_skips_and_recovers(make: Any) -> None:
    engine = make(precision="fp16", device={"memory": 1_600_000})
    before = engine.weights_sha256()
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(0)).loss * 1e4)
    first = engine.step()
    assert first.skipped and first.loss_scale == 2.0**15
    assert engine.weights_sha256() == before
    for number in range(8):
        result = step(engine, number)
    assert result.updated and engine.weights_sha256() != before


def test_two_engines_share_a_budget(make: Any) -> None:
    trained = make(device={"memory": 1_800_000})
    frozen = zoo.build("gpt2", seed=1)
    frozen.requires_grad_(False)
    other = make(frozen, device={"memory": "auto"})
    assert other._tiers is trained._tiers
    for number in range(3):
        with torch.no_grad():
            target = other(**zoo.ZOO["gpt2"].batch(number)).logits
        out = trained(**zoo.ZOO["gpt2"].batch(number))
        trained.backward(out.loss + (out.logits - target).float().pow(2).mean())
        trained.step()
        trained.check_integrity()
        other.check_integrity()
    shared = trained.weights_sha256()
    assert trained.stats()["peak_bytes"]["device"] <= 1_800_000
    trained.close()
    other.close()

    trained = make()
    other = make(copy_of(1))
    for number in range(3):
        with torch.no_grad():
            target = other(**zoo.ZOO["gpt2"].batch(number)).logits
        out = trained(**zoo.ZOO["gpt2"].batch(number))
        trained.backward(out.loss + (out.logits - target).float().pow(2).mean())
        trained.step()
    assert trained.weights_sha256() == shared


def copy_of(seed: int) -> nn.Module:
    model = zoo.build("gpt2", seed=seed)
    model.requires_grad_(False)
    return model


def test_unmanaged_parameters_train_alike(make: Any) -> None:
    shas = []
    for unmanaged in ([], ["*.ln_*", "transformer.wpe.*"]):
        engine = make(unmanaged=unmanaged, device={"memory": 1_800_000})
        for number in range(3):
            step(engine, number)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_mixed_model_keeps_its_dtypes(make: Any) -> None:
    shas = []
    for memory in ("auto", 2_500_000):
        model = zoo.build("gpt2").to(torch.bfloat16)
        for layer in model.transformer.h:
            layer.mlp.c_fc.float()
            layer.mlp.c_fc.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            layer.mlp.c_fc.register_forward_hook(lambda _, __, out: out.to(torch.bfloat16))
        engine = make(model, device={"memory": memory})
        for number in range(3):
            step(engine, number)
        assert model.transformer.h[0].mlp.c_fc.weight.dtype == torch.float32
        assert model.transformer.h[0].attn.c_attn.weight.dtype == torch.bfloat16
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_autocast(make: Any) -> None:
    shas = []
    for memory in ("auto", 3_000_000):
        engine = make(precision="fp32", device={"memory": memory})
        for number in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = engine(**zoo.ZOO["gpt2"].batch(number)).loss
            engine.backward(loss)
            engine.step()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


def test_host_modules_send_activations_instead_of_weights(make: Any) -> None:
    """An untied embedding of 128 KB, of which a batch reads 64 rows. Moves that start when a pass wants them are the
    same in each step; those ahead of it depend on the time that others take."""
    shas, moved = [], []
    for hosted in ([], ["model.embed_tokens"]):
        engine = make("llama", host_modules=hosted, device={"memory": 1_330_000}, prefetch=False)
        for number in range(8):
            if number == 4:
                before = sum(engine.stats()["moved_bytes"].values())
            step(engine, number, "llama")
            engine.check_integrity()
        moved.append(sum(engine.stats()["moved_bytes"].values()) - before)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]  # on the CPU the host computes the same numbers
    assert moved[1] < moved[0]


def test_host_modules_take_their_tied_heads_along(make: Any) -> None:
    engine = make("gpt2", host_modules=["transformer.wte"], device={"memory": 1_800_000})
    assert {"transformer.wte.weight"} == engine._session.unmanaged.hosted
    for number in range(3):
        step(engine, number)
    sha = engine.weights_sha256()
    engine.close()
    engine = make("gpt2")
    for number in range(3):
        step(engine, number)
    assert engine.weights_sha256() == sha
    with pytest.raises(
        ConfigError, match=r"host_modules: 'transformer\.wtf' matches no module; did you mean"
    ):
        make("gpt2", host_modules=["transformer.wtf"])


def test_zeros_and_infinities_that_are_written_in_place_are_what_training_goes_on_from(make: Any) -> None:
    """With what rounding took off the value before, they would be no numbers: a split master has that."""
    name, other = "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"
    shas = set()
    for master in ("split", "separate"):
        for memory in ("auto", 1_400_000):
            engine = make(device={"memory": memory}, master=master)
            for number in range(3):
                step(engine, number)
                blocks = engine.module.transformer.h
                with torch.no_grad(), engine.resident() if memory == "auto" else torch.no_grad():
                    blocks[0].mlp.c_fc.weight.clamp_(min=0)
                    blocks[1].mlp.c_fc.weight.mul_(-0.0)
                with engine.weights(name, other) as values:
                    assert (values[name] >= 0).all() and (values[name] == 0).any()
                    assert not values[other].any()
            shas.add(engine.weights_sha256())
            with torch.no_grad(), engine.resident():
                engine.module.transformer.ln_f.weight.fill_(float("inf"))
            with engine.weights("transformer.ln_f.weight") as values:
                assert values["transformer.ln_f.weight"].isinf().all()
            engine.close()
    assert len(shas) == 1


def test_writes_in_place_are_kept_or_refused(make: Any) -> None:
    shas = []
    for memory in ("auto", 1_400_000):
        engine = make(device={"memory": memory})
        step(engine, 0)
        with torch.no_grad(), engine.resident() if memory == "auto" else torch.no_grad():
            engine.module.transformer.h[0].mlp.c_fc.weight.mul_(0.5)  # the read brings it to the device
        step(engine, 1)
        step(engine, 2)
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]
    engine = make(device={"memory": 1_400_000})
    step(engine, 0)
    away = next(p for p in engine.module.parameters() if p.dim() == 2 and p.stride() == (0, 0))
    with pytest.raises(StateError, match=r"is away: zero_ needs its values"), torch.no_grad():
        away.zero_()
    step(engine, 1)


@pytest.mark.parametrize("of", ["optimizer", "module"])
def test_optimizer_face(make: Any, of: str) -> None:
    """A group added later trains; step() on the optimizer is the engine's; zero_grad drops what is held."""
    model = zoo.build("gpt2")
    late = [p for n, p in model.named_parameters() if ".h.2." in n]
    early = [p for n, p in model.named_parameters() if ".h.2." not in n]
    engine = make(model, [{"params": early}], **TIGHT)
    step(engine, 0)
    first = engine.state_dict()["transformer.h.2.mlp.c_fc.weight"]
    for parameter in model.parameters():
        parameter.grad = None
    engine.optimizer.add_param_group({"params": late})
    step(engine, 1)
    assert not torch.equal(engine.state_dict()["transformer.h.2.mlp.c_fc.weight"], first)
    sha = engine.weights_sha256()
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(2)).loss)
    getattr(engine, of).zero_grad()
    with pytest.raises(StateError, match="without a backward"):
        engine.step()
    assert engine.weights_sha256() == sha
    engine.backward(engine(**zoo.ZOO["gpt2"].batch(2)).loss)
    engine.optimizer.step()
    assert engine.weights_sha256() != sha


def test_inference_mode_and_scalars(make: Any) -> None:
    class Scaled(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(x * self.factor)

    shas = []
    for looked in (False, True):
        engine = make(Scaled(), chunk_size="8KiB", device={"memory": 60_000})
        for number in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number), dtype=torch.bfloat16)
            if looked:
                with torch.inference_mode():
                    engine(x)
            engine.backward(engine(x)["loss"])
            engine.step()
        shas.append(engine.weights_sha256())
        engine.close()
    assert shas[0] == shas[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_are_those_of_the_loss(make: Any, precision: str) -> None:
    """Whatever the loss was scaled with, and outside the chunks as inside."""
    engine = make(precision=precision, accumulate=2, unmanaged=["*.ln_f.*"])
    dtype = reference.ROUND[precision]
    model = zoo.build("gpt2").to(dtype)
    for number in range(2):
        (model(**batch_of("gpt2", number, dtype, "cpu")).loss / 2).backward()
        engine.backward(engine(**batch_of("gpt2", number, dtype, "cpu")).loss)
        if not number:
            engine.step()
    with engine.gradients("*.ln_f.weight", "*.h.0.ln_1.weight") as found:
        assert len(found) == 2
        for name, value in found.items():
            wanted = model.get_parameter(name).grad
            assert wanted is not None
            torch.testing.assert_close(value, wanted.float(), rtol=0.1, atol=2e-3)
    engine.step()


def test_a_state_dict_of_other_shapes_changes_nothing(make: Any) -> None:
    engine = make()
    step(engine, 0)
    before, good = engine.weights_sha256(), engine.state_dict()
    other = {key: value + 1 for key, value in good.items()} | {"transformer.ln_f.bias": torch.zeros(3)}
    with pytest.raises(ConfigError, match="expected shape"):
        engine.load_state_dict(other)
    assert engine.weights_sha256() == before


def test_values_outside_the_chunks_are_rounded_as_those_inside(make: Any) -> None:
    """Between two bf16 numbers, exactly: up, as an update rounds."""
    tie = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8])
    values = {}
    for unmanaged in ([], ["transformer.ln_f.weight"]):
        engine = make(unmanaged=unmanaged)
        state = engine.state_dict()
        state["transformer.ln_f.weight"][:2] = tie
        engine.load_state_dict(state)
        with torch.no_grad():
            values[len(unmanaged)] = engine(**batch_of("gpt2", 0, torch.bfloat16, "cpu")).loss.item()
            seen = engine.module.transformer.ln_f.weight
            if unmanaged:
                assert seen[:2].tolist() == [1.0078125, -1.0078125]
        engine.close()
    assert values[0] == values[1]
