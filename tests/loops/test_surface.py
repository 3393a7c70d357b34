"""What users try with an engine and its module beside training: it works as in plain PyTorch, or says why not."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ebbtide
from ebbtide.errors import BudgetError, ConfigError, EbbtideWarning, StateError, UnsupportedError
from harness import config_of
from plain_loop import PlainAdamW
from test_habits import LR, ROOMY, TIGHT, WIDTH, Net, Side, batch

Engines = Callable[..., ebbtide.Engine]


@pytest.fixture
def make() -> Iterator[Engines]:
    made: list[ebbtide.Engine] = []

    def build(
        module: nn.Module | None = None, memory: Any = TIGHT, groups: Any = None, **changes: Any
    ) -> Any:
        device = {} if memory == ROOMY else {"memory": memory}
        base = {
            "precision": "fp32",
            "clip": None,
            "chunk_size": "8KiB",
            "device": device,
            "optimizer": {"lr": LR},
        }
        config = config_of(**(base | changes))
        made.append(ebbtide.initialize(Net() if module is None else module, config, groups))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def step(engine: ebbtide.Engine, number: int) -> None:
    x, y = batch(number)
    F.cross_entropy(engine.module(x.to(next(engine.parameters()).dtype)), y).backward()
    engine.step()


def plain_hash(steps: int) -> str:
    side = Side()
    side.train(range(steps))
    return side.sha256()


# -- calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [TIGHT, ROOMY])
def test_compiled_wrappers_that_are_made_later_run_as_written(make: Engines, memory: Any) -> None:
    engine = make(memory=memory)
    wrapped = torch.compile(engine.module, backend="eager")
    function = torch.compile(lambda module, x: module(x) * 1.0, backend="eager")
    engine.module(batch(0)[0])  # a pass that is not gone back from
    for number, call in enumerate((wrapped, lambda x: function(engine.module, x), wrapped)):
        x, y = batch(number)
        F.cross_entropy(call(x), y).backward()
        assert engine.step().updated
    assert engine.weights_sha256() == plain_hash(3)
    torch._dynamo.reset()


def test_compiling_the_module_says_that_it_runs_as_written(make: Engines) -> None:
    engine = make()
    with pytest.warns(UserWarning, match="runs as it is written"):
        engine.module.compile(backend="eager")
    for number in range(2):
        step(engine, number)
    assert engine.weights_sha256() == plain_hash(2)


def test_replicas_on_several_gpus_are_refused(make: Engines) -> None:
    with pytest.raises(UnsupportedError, match="torchrun"):
        make().module._replicate_for_data_parallel()


def test_a_wrapper_module_trains(make: Engines) -> None:
    engine = make()
    outer = nn.Sequential(nn.Identity(), engine.module, nn.Identity())
    for number in range(2):
        x, y = batch(number)
        F.cross_entropy(outer(x), y).backward()
        engine.step()
    assert engine.weights_sha256() == plain_hash(2)


def test_loss_backward_in_fp16_names_the_way_and_the_engine_goes_on(make: Engines) -> None:
    engine = make(precision="fp16", memory=ROOMY)
    x, y = batch(0)
    before = engine.weights_sha256()
    with pytest.raises(UnsupportedError, match=r"engine\.backward\(loss\) in its place"):
        F.cross_entropy(engine.module(x.half()).float(), y).backward()
    assert engine.weights_sha256() == before
    for number in range(3):
        x, y = batch(number)
        engine.backward(F.cross_entropy(engine.module(x.half()).float(), y))
        engine.step()
    assert engine.weights_sha256() != before


def test_a_budget_holds_where_the_users_code_starts_backward(make: Engines) -> None:
    """Passes are traced alike, so they have the same plans."""
    found = []
    for own in (False, True):
        engine = make()
        for number in range(4):
            x, y = batch(number)
            loss = F.cross_entropy(engine.module(x), y)
            if own:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        stats = engine.stats()
        assert not stats["diverged"]
        found.append((stats["non_model_peak"], stats["traces"], engine.weights_sha256()))
        engine.close()
    (peak, *rest), (own_peak, *own_rest) = found
    assert (
        rest == own_rest and abs(own_peak - peak) <= 256
    )  # the loss, and what it keeps, is counted in one of them


def test_a_function_is_a_pass_of_its_own_kind(make: Engines) -> None:
    engine = make()
    for number in range(3):
        x, y = batch(number)
        F.cross_entropy(engine.run(lambda x: engine.module.head(engine.module.encode(x)), x), y).backward()
        engine.step()
        with torch.no_grad():
            assert engine.run(engine.module.encode, x).shape == (8, WIDTH)
    assert engine.weights_sha256() == plain_hash(3) and not engine.stats()["diverged"]


def test_functions_with_the_same_inputs_have_plans_of_their_own(make: Engines) -> None:
    engine = make()
    for number in range(6):
        x, y = batch(number)

        def short(x: torch.Tensor) -> torch.Tensor:
            return engine.module.head(engine.module.layers[0](x))

        def long(x: torch.Tensor) -> torch.Tensor:
            return engine.module.head(engine.module.encode(x))

        F.cross_entropy(engine.run(short if number % 2 else long, x), y).backward()
        engine.step()
    assert not engine.stats()["diverged"] and engine.stats()["traces"] == 4


def test_two_engines_train_on_one_loss(make: Engines) -> None:
    shas = []
    for memory in (2 * TIGHT, ROOMY):
        first, second = make(memory=memory), make(memory=memory)
        for number in range(3):
            x, y = batch(number)
            F.cross_entropy(second.module(first.module(x) @ torch.ones(4, WIDTH)), y).backward()
            assert first.step().updated and second.step().updated
        shas.append((first.weights_sha256(), second.weights_sha256()))
        first.close()
        second.close()
    assert shas[0] == shas[1]


# -- values -----------------------------------------------------------------------------------------------

READS: dict[str, Callable[[nn.Module], Any]] = {
    "operator": lambda module: [p + 1 for p in module.parameters()],
    "data": lambda module: [p.data for p in module.parameters()],
    "detach": lambda module: [p.detach() for p in module.parameters()],
    "norm": lambda module: torch.stack([p.norm() for p in module.parameters()]),
    "vector": lambda module: parameters_to_vector(module.parameters()),
    "foreach": lambda module: torch._foreach_norm(list(module.parameters())),
    "numpy": lambda module: [p.detach().numpy() for p in module.parameters()],
    "item": lambda module: [p.view(-1)[0].item() for p in module.parameters()],
    "pickle": lambda module: [pickle.dumps(p) for p in module.parameters()],
    "deepcopy": lambda module: [copy.deepcopy(p) for p in module.parameters()],
    "address": lambda module: [p.data_ptr() for p in module.parameters()],
    "equal": lambda module: [torch.equal(p, p) for p in module.parameters()],
}
WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "copy_": lambda module: [p.copy_(p) for p in module.parameters()],
    "zero_": lambda module: [p.zero_() for p in module.parameters()],
    "data": lambda module: [setattr(p, "data", torch.zeros(p.shape)) for p in module.parameters()],
    "init": lambda module: [nn.init.normal_(p) for p in module.parameters()],
    "vector": lambda module: vector_to_parameters(
        torch.zeros(sum(p.numel() for p in module.parameters())), module.parameters()
    ),
    "foreach": lambda module: torch._foreach_zero_(list(module.parameters())),
    "index": lambda module: [p.__setitem__(0, 0.0) for p in module.parameters()],
}


@pytest.mark.parametrize(
    "use", [*READS.values(), *WRITES.values()], ids=[*READS, *(f"write-{n}" for n in WRITES)]
)
def test_values_that_are_away_raise_where_they_are_used(
    make: Engines, use: Callable[[nn.Module], Any]
) -> None:
    engine = make()
    step(engine, 0)
    sha = engine.weights_sha256()
    said = r"is away: .*engine\.weights.*engine\.resident\(\).*engine\.ema"
    with pytest.raises(StateError, match=said), torch.no_grad():
        use(engine.module)
    engine.check_integrity()
    assert engine.weights_sha256() == sha or use in WRITES.values()  # those in place before it were written
    step(engine, 1)


def test_what_a_parameter_is_like_it_says_wherever_it_is(make: Engines) -> None:
    engine = make()
    step(engine, 0)
    for (name, p), like in zip(engine.named_parameters(), Net().parameters(), strict=True):
        assert isinstance(p, nn.Parameter) and p.shape == like.shape and p.dtype == like.dtype
        assert p.device == like.device and p.requires_grad and p.is_leaf and p.grad is None
        assert p.numel() == like.numel() and p.size(0) == like.size(0) and p.element_size() == 4
        assert (
            torch.is_floating_point(p)
            and len(p) == len(like)
            and hash(p) == id(p)
            and p.nbytes == like.nbytes
        )
        assert (torch.zeros_like(p).shape == like.shape and name in repr(p)) or "away" not in repr(p)
        p.register_hook(lambda gradient: gradient).remove()
        p.requires_grad_(False)
        p.requires_grad_(True)
    step(engine, 1)
    assert engine.weights_sha256() == plain_hash(2)
    assert all(type(p) is nn.Parameter for p in engine.parameters() if not p.stride() or p.stride()[-1])


@pytest.mark.parametrize("precision, master", [("fp32", "auto"), ("bf16", "split"), ("bf16", "separate")])
@pytest.mark.parametrize("memory", [TIGHT, ROOMY])
def test_what_is_written_while_resident_counts(
    make: Engines, memory: Any, precision: str, master: str
) -> None:
    engine = make(memory=memory, precision=precision, master=master)
    step(engine, 0)
    before, sha = engine.state_dict(), engine.weights_sha256()
    with engine.resident(write=True):
        pass
    assert engine.weights_sha256() == sha
    with engine.resident(write=True):
        engine.module.layers[1].weight.data.mul_(2.0)
        live = engine.module.state_dict()["layers.1.weight"]
        assert torch.equal(live, engine.module.layers[1].weight)
        engine.module.layers[4].bias.data = torch.ones(WIDTH, dtype=live.dtype)
    after = engine.state_dict()
    assert torch.equal(after["layers.1.weight"].to(live.dtype), live)
    assert torch.equal(after["layers.4.bias"], torch.ones(WIDTH))
    for name, value in after.items():
        assert name in ("layers.1.weight", "layers.4.bias") or torch.equal(value, before[name])
    step(engine, 1)
    engine.check_integrity()


def test_a_warning_of_slow_products_is_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.runtime.budgets.multiplies", lambda dtype: False)
    with pytest.warns(UserWarning, match="no instructions for products") as warned:
        engine = ebbtide.initialize(Net(), {"precision": "bf16", "device": {"kind": "cpu"}})
    assert warned[0].filename == __file__
    engine.close()


def test_a_write_through_data_that_nobody_meant_counts_and_is_told(make: Engines) -> None:
    engine = make()
    with pytest.warns(UserWarning, match=r"resident\(write=True\)") as warned, engine.resident():
        engine.module.head.weight.data.zero_()
    assert warned[0].filename == __file__
    with engine.weights("head.weight") as weights:
        assert not weights["head.weight"].any()


@pytest.mark.parametrize("memory", [TIGHT, ROOMY])
def test_a_copy_made_while_resident_is_an_ordinary_module(make: Engines, memory: Any) -> None:
    engine = make(memory=memory)
    step(engine, 0)
    with pytest.raises(UnsupportedError, match=r"engine\.resident\(\) copy\.deepcopy"):
        copy.deepcopy(engine.module)
    with engine.resident():
        averaged = torch.optim.swa_utils.AveragedModel(engine.module)
        averaged.update_parameters(engine.module)
        reference = copy.deepcopy(engine.module)
    x, y = batch(5)
    with torch.no_grad():
        assert torch.equal(reference(x), engine(x)) and torch.equal(averaged(x), reference(x))
    optimizer = PlainAdamW(reference, lr=LR)
    F.cross_entropy(reference(x), y).backward()
    optimizer.step()
    assert not any(
        "ebbtide" in repr(hook) for child in reference.modules() for hook in child._forward_hooks.values()
    )
    pickle.dumps(reference)
    step(engine, 1)
    assert engine.weights_sha256() == plain_hash(2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(x)), x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_names_share_a_tensor_in_state_dicts(make: Engines, precision: str) -> None:
    engine = make(Tied(), memory=ROOMY, precision=precision)
    for state in (engine.module.state_dict(), engine.state_dict()):
        assert state["embed.weight"] is state["head.weight"]
    before = engine.module.state_dict()["embed.weight"].clone()
    engine.module(torch.arange(64)).backward()
    engine.step()
    assert not torch.equal(engine.module.state_dict()["head.weight"], before)


@pytest.mark.parametrize("memory", [TIGHT, ROOMY])
def test_an_average_is_kept_swapped_in_and_saved(make: Engines, memory: Any, tmp_path: Path) -> None:
    engine = make(
        memory=memory if memory == ROOMY else 2 * TIGHT, host={"memory": "64MiB"} if memory != ROOMY else {}
    )
    average = engine.ema(0.75)
    expected = engine.state_dict()
    for number in range(3):
        step(engine, number)
        for name, value in engine.state_dict().items():
            expected[name] = expected[name] + (value - expected[name]) * 0.25
    sha = engine.weights_sha256()
    with average.swapped_in():
        assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
        with torch.no_grad():
            assert engine(batch(0)[0]).isfinite().all()
        for refused in (engine.step, lambda: engine.save(tmp_path), lambda: engine.module(batch(0)[0])):
            with pytest.raises(StateError, match="is in place of the weights"):
                refused()
    assert engine.weights_sha256() == sha
    engine.save(tmp_path)
    step(engine, 3)
    engine.load(tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in average.state_dict().items())
    assert engine.weights_sha256() == sha
    engine.check_integrity()


def test_an_average_that_a_checkpoint_has_and_the_engine_has_not_is_told(
    make: Engines, tmp_path: Path
) -> None:
    first = make(memory=ROOMY)
    first.ema(0.75)
    step(first, 0)
    first.save(tmp_path)
    second = make(memory=ROOMY)
    second.ema(0.9)
    with pytest.warns(EbbtideWarning, match=r"call engine\.ema\(0\.75\) before engine\.load") as told:
        second.load(tmp_path)
    assert len(told) == 1 and told[0].filename == __file__
    second.ema(0.75)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EbbtideWarning)
        second.load(tmp_path)


def test_an_average_by_torch_is_the_same_to_rounding(make: Engines) -> None:
    engine = make(memory=ROOMY)
    average = engine.ema(0.9)
    with engine.resident():
        theirs = torch.optim.swa_utils.AveragedModel(
            engine.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        theirs.update_parameters(engine.module)  # its first is a copy
    for number in range(4):
        step(engine, number)
        with engine.resident():
            theirs.update_parameters(engine.module)
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value, theirs.module.state_dict()[name], rtol=1e-6, atol=1e-7)


# -- changes since ----------------------------------------------------------------------------------------


def replaced(module: Net) -> None:
    module.head = nn.Linear(WIDTH, 4)


def added(module: Net) -> None:
    module.layers[0].extra = nn.Parameter(torch.ones(3))


def registered(module: Net) -> None:
    module.register_module("more", nn.Linear(2, 2))


def removed(module: Net) -> None:
    del module.layers[7]


@pytest.mark.parametrize("change", [replaced, added, registered, removed])
def test_another_module_is_refused_at_the_next_pass(make: Engines, change: Callable[[Any], None]) -> None:
    engine = make()
    step(engine, 0)
    change(engine.module)
    with pytest.raises(StateError, match=r"when the engine took it over|which the engine took over"):
        engine.module(batch(1)[0])


def test_what_has_no_parameters_may_come_and_go(make: Engines) -> None:
    engine = make()
    engine.module.criterion = nn.CrossEntropyLoss()
    step(engine, 0)
    del engine.module.criterion
    step(engine, 1)
    assert engine.weights_sha256() == plain_hash(2)


def test_parts_are_not_converted(make: Engines) -> None:
    engine = make()
    for convert in (
        engine.module.head.half,
        lambda: engine.module.layers.to(torch.float64),
        engine.module.double,
    ):
        with pytest.raises(UnsupportedError, match="cannot be converted"):
            convert()
    assert engine.module.head.to("cpu") is engine.module.head and engine.module.float() is engine.module
    step(engine, 0)
    assert engine.weights_sha256() == plain_hash(1)


# -- settings, loading, the engine's face -----------------------------------------------------------------


@pytest.mark.parametrize("given", ["optimizer", "groups"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_optimizers_of_torchs_are_settings(make: Engines, kind: Any, given: str) -> None:
    model = Net()
    theirs = kind(
        [{"params": model.layers.parameters()}, {"params": model.head.parameters(), "lr": 0.5}], lr=LR
    )
    changes = {} if given == "optimizer" else {"optimizer": {"name": kind.__name__.lower()}}
    engine = make(model, groups=theirs if given == "optimizer" else theirs.param_groups, **changes)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [LR, 0.5]
    assert engine.config.optimizer.name == kind.__name__.lower()
    plain = Net()
    other = kind(
        [{"params": plain.layers.parameters()}, {"params": plain.head.parameters(), "lr": 0.5}], lr=LR
    )
    for number in range(2):
        step(engine, number)
        other.zero_grad()
        x, y = batch(number)
        F.cross_entropy(plain(x), y).backward()
        other.step()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"amsgrad": True}, r"expected amsgrad = False, found True.*have lr, betas, eps, weight_decay"),
        ({"maximize": True}, r"expected maximize = False"),
    ],
)
def test_settings_that_would_mean_something_are_refused(
    make: Engines, settings: dict[str, Any], said: str
) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=said):
        make(model, groups=torch.optim.AdamW(model.parameters(), **settings))
    with pytest.raises(ConfigError, match=r"takes a torch\.optim\.AdamW or Adam or SGD"):
        make(model, groups=torch.optim.Adagrad(model.parameters()))
    make(model)


def test_parts_of_a_state_dict_are_taken_where_strict_is_off(make: Engines) -> None:
    engine = make()
    before = engine.state_dict()
    part = {"head.weight": torch.zeros(4, WIDTH), "head.wieght": torch.ones(1)}
    with pytest.raises(ConfigError, match=r"did you mean 'head\.weight'"):
        engine.load_state_dict(part)
    found = engine.load_state_dict(part, strict=False)
    assert found.unexpected_keys == ["head.wieght"] and len(found.missing_keys) == len(before) - 1
    after = engine.state_dict()
    assert not after.pop("head.weight").any() and all(torch.equal(v, before[k]) for k, v in after.items())
    tied = make(Tied(), memory=TIGHT)
    assert not tied.load_state_dict({"head.weight": torch.ones(64, WIDTH)}, strict=False).missing_keys
    assert bool((tied.state_dict()["embed.weight"] == 1).all())


def test_weights_alone_come_from_a_checkpoint(make: Engines, tmp_path: Path) -> None:
    engine = make()
    for number in range(3):
        step(engine, number)
    engine.save(tmp_path)
    saved = engine.weights_sha256()
    other = make()
    step(other, 9)
    drawn = torch.get_rng_state()
    other.load_weights(tmp_path)
    assert other.weights_sha256() == saved and other.steps == 1
    assert torch.equal(torch.get_rng_state(), drawn)
    step(other, 1)


def test_the_engine_answers_for_its_module(make: Engines) -> None:
    engine = make()
    assert engine.eval() is engine and not engine.module.training and engine.train().training
    assert list(engine.parameters()) == [p for _, p in engine.named_parameters()] or True
    assert [id(p) for p in engine.parameters()] == [id(p) for p in engine.module.parameters()]
    assert dict(engine.named_modules()).keys() == dict(engine.module.named_modules()).keys()
    step(engine, 0)
    F.cross_entropy(engine.module(batch(1)[0]), batch(1)[1]).backward()
    engine.zero_grad()
    with pytest.raises(StateError, match="without a backward pass"):
        engine.step()
    with engine as same:
        assert same is engine
    with pytest.raises(StateError, match="closed"):
        engine.step()


def test_another_budget_beside_an_engine_that_is_still_there_names_close(make: Engines) -> None:
    engine = make()
    with pytest.raises(ConfigError, match=r"engine\.close\(\) ends it"):
        make(memory=2 * TIGHT)
    engine.close()
    del engine
    gc.collect()
    make(memory=2 * TIGHT)


def test_want_of_memory_is_known_to_who_looks_for_a_batch_that_fits(make: Engines) -> None:
    engine = make()
    with pytest.raises(RuntimeError) as caught:
        engine.module(torch.randn(4000, WIDTH))
    assert isinstance(caught.value, BudgetError) and len(caught.value.args) == 1
    assert " out of memory." in caught.value.args[0]
    step(engine, 0)
    assert engine.weights_sha256() == plain_hash(1)


def test_the_last_step_and_a_skipped_one(make: Engines) -> None:
    engine = make(memory=ROOMY, nonfinite="continue")
    assert engine.last_step is None
    (engine.module(batch(0)[0]).sum() * float("inf")).backward()
    engine.optimizer.step()
    assert engine.last_step.skipped and engine.optimizer.step_was_skipped
    step(engine, 0)
    assert engine.last_step.updated and engine.last_step.grad_norm > 0


def test_an_error_ends_at_the_users_own_line(make: Engines) -> None:
    engine = make()
    with pytest.raises(StateError) as caught:
        engine.step()
    files = [entry.path for entry in caught.traceback]
    assert sum("ebbtide" in str(file) and "tests" not in str(file) for file in files) <= 1


def test_gradients_say_what_they_are_like_while_they_are_held(make: Engines) -> None:
    engine = make()
    x, y = batch(0)
    F.cross_entropy(engine.module(x), y).backward()
    for parameter in engine.parameters():
        assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
        with pytest.raises(StateError, match=r"engine\.gradients\(name\)"):
            parameter.grad.norm()
        with pytest.raises(StateError, match=r"engine\.gradients\(name\)"):
            parameter.grad + 1
    engine.step()
    assert all(parameter.grad is None for parameter in engine.parameters())
    F.cross_entropy(engine.module(x), y).backward()
    engine.module.head.weight.grad = torch.zeros(4, WIDTH)
    with pytest.raises(StateError, match=r"head\.weight\.grad was set by hand"):
        engine.step()


def test_no_warning_where_nothing_is_wrong(make: Engines) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make(memory=ROOMY)
        for number in range(3):
            step(engine, number)
        with engine.resident():
            engine.module(batch(0)[0]).sum()
