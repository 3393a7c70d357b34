"""Accelerate's loop with the model in an engine, beside the stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

from ebbtide.config import Config
from ebbtide.errors import ConfigError, StateError, UnsupportedError
from ebbtide.integrations import _accelerate as private
from ebbtide.integrations.accelerate import Accelerator
from group import as_torchrun_says, group_of
from sampling import some
from test_integrations_peft import adapted
from test_integrations_transformers import Rows, build, same, tight


@pytest.fixture(autouse=True)
def fresh() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(kind: Any, lora: bool = False, **more: Any) -> tuple[Any, ...]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    own = {"ebbtide": tight()} if kind is Accelerator else {}
    accelerator = kind(cpu=True, gradient_accumulation_steps=3, **more, **own)
    model = adapted("lora") if lora else build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    loader = DataLoader(Rows(30), batch_size=4)  # eight batches: windows of three, three and two
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> list[Any]:
    found: list[Any] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append((loss.item(), norm, schedule.get_last_lr()[0], optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("lora", [False, True])
def test_the_loop_trains_as_stock_does(lora: bool) -> None:
    ours, stock = prepared(Accelerator, lora), prepared(accelerate.Accelerator, lora)
    for _ in range(2):
        for mine, its in zip(epoch(*ours), epoch(*stock), strict=True):
            assert mine[0] == pytest.approx(its[0], rel=1e-6)
            assert (mine[1] is None) == (its[1] is None)
            assert mine[1] is None or mine[1] == pytest.approx(its[1], rel=1e-4)
            assert mine[2:] == its[2:]
    ours[1].eval()
    stock[1].eval()
    with torch.no_grad():
        ids = Rows(3)[2]["input_ids"][None]
        torch.testing.assert_close(
            ours[1](input_ids=ids).logits, stock[1](input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )
    state, expected = ours[0].get_state_dict(ours[1]), stock[0].get_state_dict(stock[1])
    assert set(state) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=2e-5)  # k biases: no gradient but noise
    stats = ours[0].engines[0].stats()
    assert stats["peak_bytes"]["device"] <= tight()["device"]["memory"]
    assert ours[0].unwrap_model(ours[1]) is ours[1]
    ours[0].free_memory()


def test_a_loop_that_clips_by_value_names_the_setting() -> None:
    found = []
    for kind in (Accelerator, accelerate.Accelerator):
        own = {"ebbtide": tight() | {"clip_value": 1e-3}} if kind is Accelerator else {}
        accelerator, model = kind(cpu=True, **own), build()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for row in (0, 1):
            accelerator.backward(model(**{key: value[None] for key, value in Rows(2)[row].items()}).loss)
            if kind is not Accelerator:
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.get_state_dict(model))
        accelerator.free_memory()
    ours, stock = found
    for key, value in stock.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_saved_goes_on_bit_for_bit(lora: bool, tmp_path: Path) -> None:
    whole = prepared(Accelerator, lora)
    epoch(*whole)
    whole[0].save_state(str(tmp_path / "saved"))
    logs = epoch(*whole)
    expected = whole[0].get_state_dict(whole[1])
    whole[0].free_memory()
    again = prepared(Accelerator, lora)
    again[0].load_state(str(tmp_path / "saved"))
    assert epoch(*again) == logs
    same(again[0].get_state_dict(again[1]), expected)
    again[0].save_model(again[1], str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()
    again[0].free_memory()


def test_one_folder_is_saved_to_again_and_a_save_that_ended_half_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `save_state("last")` in a loop: the newest alone stays, and no load mixes two steps."""
    made = prepared(Accelerator)
    folder = tmp_path / "last"
    for _ in range(2):
        epoch(*made)
        made[0].save_state(str(folder))
    assert len(list((folder / "ebbtide-0").glob("step-*"))) == 1
    engine = made[0].engine_of(made[1])
    with monkeypatch.context() as patch:
        patch.setattr(
            type(engine), "save_as_stock", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        epoch(*made)
        with pytest.raises(KeyboardInterrupt):
            made[0].save_state(str(folder))
    with pytest.raises(
        ConfigError, match=r"into .*last did not come to its end, so its files are of two steps"
    ):
        made[0].load_state(str(folder))
    made[0].save_state(str(folder))
    made[0].load_state(str(folder))
    assert engine.steps == 9
    made[0].free_memory()


def test_a_part_of_a_model_is_not_clipped_alone(tmp_path: Path) -> None:
    """The engine's norm is that of all gradients; a call for a part, or for two models, would be another's number."""
    accelerator, model, _optimizer, loader, _ = prepared(Accelerator)
    accelerator.backward(model(**next(iter(loader))).loss)
    some_of_them = list(model.transformer.h[2].parameters())
    with pytest.raises(UnsupportedError, match=r"all its parameters that are trained .* of them are missing"):
        accelerator.clip_grad_norm_(some_of_them, 1.0)
    others = [*model.parameters(), torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(UnsupportedError, match="there are 1 others"):
        accelerator.clip_grad_norm_(others, 1.0)
    assert accelerator.clip_grad_norm_(list(model.parameters()), 1.0).isfinite()
    accelerator.free_memory()


def test_a_script_that_only_evaluates_loads_a_run_of_several_groups(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True, ebbtide=tight()), build()
    own = list(model.parameters())
    groups = [{"params": own[:3], "weight_decay": 0.0}, {"params": own[3:]}]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=3e-3))
    accelerator.backward(model(**batch_of_rows()).loss)
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    expected = accelerator.get_state_dict(model)
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, ebbtide=tight())
    model = accelerator.prepare(build(1)).eval()
    accelerator.load_state(str(tmp_path))
    same(accelerator.get_state_dict(model), expected)
    accelerator.free_memory()


def batch_of_rows() -> dict[str, torch.Tensor]:
    return next(iter(DataLoader(Rows(4), batch_size=4)))


def test_it_saves_within_a_step_as_stock_does(tmp_path: Path) -> None:
    found = []
    for kind in (Accelerator, accelerate.Accelerator):
        accelerator, model, optimizer, loader, _schedule = prepared(kind)
        for place, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            if place == 3:
                before = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
                if kind is Accelerator:
                    with pytest.warns(
                        UserWarning, match="in the midst of a step: the gradients of its first"
                    ):
                        accelerator.save_state(str(tmp_path / "ours"))
                else:
                    accelerator.save_state(str(tmp_path / "stock"))
        found.append({k: v.clone() for k, v in accelerator.get_state_dict(model).items()})
        accelerator.load_state(str(tmp_path / ("ours" if kind is Accelerator else "stock")))
        same(accelerator.get_state_dict(model), before)
        if kind is Accelerator:
            accelerator.free_memory()
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-4, atol=2e-5)


def test_hooks_of_ones_own_save_and_load_models(tmp_path: Path) -> None:
    """As in scripts that write a folder for from_pretrained beside each state."""
    accelerator, model, *rest = prepared(Accelerator)
    seen = []

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for one in models:
            one.save_pretrained(Path(folder) / "mine")
            weights.pop()
            seen.append("saved")

    def load(models: list[Any], folder: str) -> None:
        while models:
            one = models.pop()
            one.load_state_dict(type(one).from_pretrained(Path(folder) / "mine").state_dict())
            seen.append("loaded")

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    epoch(accelerator, model, *rest)
    accelerator.save_state(str(tmp_path))
    expected = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    rows = epoch(accelerator, model, *rest)
    accelerator.load_state(str(tmp_path))
    same(accelerator.get_state_dict(model), expected)
    assert epoch(accelerator, model, *rest) == rows
    assert seen == ["saved", "loaded"]
    read = type(model).from_pretrained(tmp_path / "mine").state_dict()
    same(dict(read), expected)
    accelerator.free_memory()


def test_a_frozen_model_beside_it_shares_the_budget() -> None:
    accelerator, model, *_ = prepared(Accelerator)
    teacher = accelerator.prepare(build(1).eval())
    ids = Rows(2)[1]["input_ids"][None]
    with torch.no_grad():
        torch.testing.assert_close(teacher(input_ids=ids).logits, build(1)(input_ids=ids).logits)
    accelerator.backward(
        (model(input_ids=ids).logits - teacher(input_ids=ids).logits.detach()).square().mean()
    )
    assert accelerator.engine_of(teacher) is accelerator.engines[1]
    accelerator.free_memory()


def test_what_is_freed_is_an_ordinary_model_that_another_takes() -> None:
    ours, stock = prepared(Accelerator), prepared(accelerate.Accelerator)
    for accelerator, model, *rest in (ours, stock):
        epoch(accelerator, model, *rest)
    first = ours[1].state_dict()
    found = ours[0].get_state_dict(ours[1])
    ours[0].free_memory()
    assert all(type(one) is torch.nn.Parameter for one in ours[1].parameters())
    same(ours[1].state_dict(), first)
    same(ours[1].state_dict(), {key: found[key] for key in first})
    second = Accelerator(cpu=True, ebbtide=tight())
    model, _ = second.prepare(ours[1], torch.optim.AdamW(ours[1].parameters()))
    third = Accelerator(cpu=True, ebbtide=tight())
    model = third.prepare(model).eval()  # it has no optimizer
    assert second.engines[0].closed
    with torch.no_grad():
        model(input_ids=Rows(2)[1]["input_ids"][None])
    assert third.engine_of(model) and not any(one.requires_grad for one in model.parameters())
    third.free_memory()
    assert all(one.requires_grad for one in model.parameters())
    same(model.state_dict(), first)


def test_the_optimizer_may_come_after_its_model(tmp_path: Path) -> None:
    at_once = prepared(Accelerator)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, ebbtide=tight())
    model = accelerator.prepare(build())
    with pytest.raises(StateError, match="first call"):
        accelerator.engine_of(model)
    ids = Rows(2)[1]["input_ids"][None]
    model.eval()
    with torch.no_grad():
        first = model(input_ids=ids).logits
    model.train()
    assert not any(
        one.requires_grad for one in model.parameters()
    )  # to be evaluated, as far as it has been told
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    loader = accelerator.prepare(DataLoader(Rows(30), batch_size=4))
    optimizer = accelerator.prepare(optimizer)
    schedule = accelerator.prepare(schedule)
    assert epoch(accelerator, model, optimizer, loader, schedule) == epoch(*at_once)
    same(accelerator.get_state_dict(model), at_once[0].get_state_dict(at_once[1]))
    assert first.shape[-1] == model.config.vocab_size and len(accelerator.engines) == 1
    for each in (accelerator, at_once[0]):
        each.free_memory()


def test_a_model_that_trains_without_an_optimizer_is_pytorchs_and_said_so(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, ebbtide=tight())
    model, teacher = accelerator.prepare(build(), build(1).eval())
    plain = build()
    ids = Rows(2)[1]["input_ids"][None]
    with torch.no_grad():
        teacher(input_ids=ids)
    with pytest.warns(UserWarning, match="outside the budgets"):
        loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    plain(input_ids=ids, labels=ids).loss.backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert norm == torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    accelerator.save_state(str(tmp_path / "saved"))
    again = Accelerator(cpu=True, ebbtide=tight())
    model, other = again.prepare(build(2), build(3).eval())
    again.load_state(str(tmp_path / "saved"))
    same(again.get_state_dict(model), plain.state_dict())
    same(again.get_state_dict(other), accelerator.get_state_dict(teacher))
    for each in (accelerator, again):
        each.free_memory()


def on_ranks(kind: Any, lora: bool, folder: str, resume: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What `accelerate launch` would start: two epochs, or the second of them from where the first was saved."""
    with as_torchrun_says() as rank:
        made = prepared(kind, lora)
        assert made[0].num_processes == 2
        found = []
        if resume:
            made[0].load_state(folder)
        else:
            if kind is Accelerator and made[0].is_main_process:  # it alone writes
                made[0].register_save_state_pre_hook(
                    lambda models, _, where: models[0].save_pretrained(Path(where) / "mine")
                )
            elif kind is Accelerator:
                made[0].register_save_state_pre_hook(lambda models, _, where: None)
            found += epoch(*made)
            made[0].save_state(folder)
        found += epoch(*made)
        everywhere = made[0].gather(torch.tensor([float(rank)]))
        assert everywhere.tolist() == [0.0, 1.0]
        weights = {name: value.clone() for name, value in made[0].get_state_dict(made[1]).items()}
        made[0].free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
    return found, weights


@pytest.mark.parametrize("lora", some([False, True], 1))
def test_on_two_ranks_it_trains_as_stock_does_and_goes_on(lora: bool, tmp_path: Path) -> None:
    run, mine, its = group_of(2).run, str(tmp_path / "ours"), str(tmp_path / "stock")
    ours = run(on_ranks, Accelerator, lora, mine, False)
    stock = run(on_ranks, accelerate.Accelerator, lora, its, False)
    for (rows, weights), (expected, others) in zip(ours, stock, strict=True):
        assert len(rows) == len(expected) == 8  # four batches of each rank: a window of three and one of one
        for one, other in zip(rows, expected, strict=True):
            assert one[0] == pytest.approx(other[0], rel=1e-6)
            assert (one[1] is None) == (other[1] is None)
            assert one[1] is None or one[1] == pytest.approx(other[1], rel=1e-4)
            assert one[2:] == other[2:]
        for key, value in others.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=2e-5)
    assert list((tmp_path / "ours" / "mine").glob("*.safetensors"))
    again = run(on_ranks, Accelerator, lora, mine, True)
    for (rows, weights), (whole, expected) in zip(again, ours, strict=True):
        assert rows == whole[4:]
        same(weights, expected)


def test_fp16_scales_its_own_losses() -> None:
    ours = prepared(Accelerator, mixed_precision="fp16")
    ours[0].prepare(build(1))  # never called, so no loss comes from it
    assert ours[0].scaler is None and ours[0].engines[0].config.precision == "fp16"
    epoch(*ours)
    assert ours[0].engines[0].loss_scale > 1 and not ours[0].optimizer_step_was_skipped
    ours[0].free_memory()


def test_precision_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared_settings(Accelerator(cpu=True, ebbtide=tight())) == ("no", "fp32")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert prepared_settings(Accelerator(cpu=True, ebbtide=tight())) == ("bf16", "bf16")
    with pytest.raises(ConfigError, match="accelerate launch says 'bf16'"):
        Accelerator(cpu=True, ebbtide=tight() | {"precision": "fp16"})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UnsupportedError, match="--mixed_precision fp8"):
        Accelerator(cpu=True, ebbtide=tight())
    for precision in ("bf16", "fp16"):  # a Config always has one
        own = Config.read(tight() | {"precision": precision})
        assert prepared_settings(Accelerator(cpu=True, mixed_precision="no", ebbtide=own))[1] == precision
    asked = Accelerator(cpu=True, mixed_precision="no", ebbtide=tight() | {"precision": "fp16"})
    assert prepared_settings(asked) == ("fp16", "fp16")


def prepared_settings(accelerator: Accelerator) -> tuple[str, str]:
    """What it says, and what an engine of its computes in."""
    model = build()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = accelerator.mixed_precision, accelerator.engine_of(model).config.precision
    accelerator.free_memory()
    return found


@pytest.mark.parametrize("name", [name for name, *_ in private.LAUNCHED])
def test_a_launcher_that_asks_for_others_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "inductor" if "DYNAMO" in name else "true")
    with pytest.raises(UnsupportedError, match=name):
        Accelerator(cpu=True, ebbtide=tight())


def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="fp8"):
        Accelerator(cpu=True, mixed_precision="fp8", ebbtide=tight())
    with pytest.raises(UnsupportedError, match="fsdp_plugin"):
        Accelerator(cpu=True, fsdp_plugin=object(), ebbtide=tight())
    with pytest.raises(ConfigError, match="leave one out"):
        Accelerator(cpu=True, mixed_precision="fp16", ebbtide=tight() | {"precision": "bf16"})
    placed = build()
    placed.is_loaded_in_8bit = True
    with pytest.raises(UnsupportedError, match="is quantized"):
        Accelerator(cpu=True, ebbtide=tight()).prepare(placed)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        Accelerator(cpu=True, ebbtide=tight() | {"accumulate": 2})
    accelerator = Accelerator(cpu=True, ebbtide=tight())
    model = build()
    with pytest.raises(ConfigError, match="module first, or both at once"):
        accelerator.prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(UnsupportedError, match="for 2 models, an engine has one"):
        both = [build(), build(1)]
        accelerator.prepare(*both, torch.optim.AdamW([one for each in both for one in each.parameters()]))
    halves = list(model.parameters())
    with pytest.raises(UnsupportedError, match="several optimizers"):
        accelerator.prepare(model, torch.optim.AdamW(halves[:2]), torch.optim.AdamW(halves[2:]))
    accelerator.free_memory()
    accelerator, model, *_ = prepared(Accelerator)
    with pytest.raises(UnsupportedError, match="norm_type"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(UnsupportedError, match=r"ebbtide=\{'clip_value'"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(ConfigError, match="ebbtide-0"):
        (tmp_path / "empty").mkdir()
        accelerator.load_state(str(tmp_path / "empty"))
    accelerator.free_memory()
