"""Lightning's Trainer with the module in an engine, beside the stock one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from ebbtide.errors import ConfigError, EbbtideWarning, UnsupportedError
from ebbtide.integrations.lightning import EbbtideStrategy
from group import as_torchrun_says, group_of
from sampling import some
from test_integrations_peft import adapted
from test_integrations_transformers import Rows, build, same, tight

warnings.filterwarnings("ignore", module="lightning")


class Learner(pl.LightningModule):
    def __init__(self, lora: bool = False) -> None:
        super().__init__()
        self.model = adapted("lora") if lora else build()
        self.seen: list[float] = []
        self.norms: list[float] = []
        """Of all gradients, before they are clipped."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_gradient_clipping(self, optimizer: Any, **given: Any) -> None:
        engine = getattr(self.trainer.strategy, "engine", None)
        if engine is not None:
            self.clip_gradients(optimizer, **given)
            self.norms.append(float(engine.clip_grad_norm_(1.0)))
        else:
            gradients = [one.grad for one in self.parameters() if one.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            self.clip_gradients(optimizer, **given)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer_of(folder: Path, ours: bool, **more: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": 2,
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "accelerator": "cpu",
    }
    if ours:
        given["strategy"] = EbbtideStrategy(tight())
    return pl.Trainer(**given | more)


def loader(count: int, first: int = 0) -> Any:
    return DataLoader(
        Rows(count, first), batch_size=4
    )  # thirty rows: windows of three, three and two batches


def fitted(
    folder: Path, ours: bool, resume: str | None = None, lora: bool = False, **more: Any
) -> tuple[Learner, pl.Trainer]:
    learner, trainer = Learner(lora), trainer_of(folder, ours, **more)
    trainer.fit(learner, loader(30), [loader(8, 1000), loader(8, 2000)], ckpt_path=resume)
    return learner, trainer


@pytest.mark.parametrize("lora", [False, True])
def test_it_trains_as_stock_does(lora: bool, tmp_path: Path) -> None:
    ours, stock = (fitted(tmp_path / name, name == "ours", lora=lora) for name in ("ours", "stock"))
    assert ours[0].seen == pytest.approx(stock[0].seen, rel=1e-6)
    assert ours[0].norms == pytest.approx(stock[0].norms, rel=1e-4) and len(ours[0].norms) == 6
    for key, value in stock[1].callback_metrics.items():
        assert float(ours[1].callback_metrics[key]) == pytest.approx(float(value), rel=1e-6), key
    groups = [trainer.optimizers[0].param_groups[0]["lr"] for _, trainer in (ours, stock)]
    assert groups[0] == groups[1]
    engine = ours[1].strategy.engine
    assert engine.stats()["peak_bytes"]["device"] <= tight()["device"]["memory"]
    for key, value in stock[0].state_dict().items():
        torch.testing.assert_close(engine.state_dict()[key], value, rtol=1e-4, atol=2e-5)
    found = ours[1].predict(ours[0], loader(6, 3000))
    expected = stock[1].predict(stock[0], loader(6, 3000))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    ours[1].strategy.close()


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_goes_on_bit_for_bit_and_loads_anywhere(lora: bool, tmp_path: Path) -> None:
    keeps = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", save_top_k=-1)
    whole, trainer = fitted(tmp_path / "whole", True, lora=lora, callbacks=[keeps])
    expected = trainer.strategy.engine.state_dict()
    trainer.strategy.close()
    again, later = fitted(tmp_path / "again", True, str(tmp_path / "kept" / "epoch=0.ckpt"), lora)
    same(later.strategy.engine.state_dict(), expected)
    assert again.seen == whole.seen[len(whole.seen) // 2 :]
    later.strategy.close()
    plain = Learner.load_from_checkpoint(tmp_path / "kept" / "epoch=1.ckpt", lora=lora)
    same(dict(plain.state_dict()), expected)


def test_it_goes_on_from_a_stock_checkpoint(tmp_path: Path) -> None:
    keeps = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", save_top_k=-1)
    whole, _ = fitted(tmp_path / "whole", False, callbacks=[keeps])
    ours, trainer = fitted(tmp_path / "ours", True, resume=str(tmp_path / "kept" / "epoch=0.ckpt"))
    assert ours.seen == pytest.approx(whole.seen[len(whole.seen) // 2 :], rel=1e-5)
    trainer.strategy.close()


class Killed(BaseException):
    """As if the process had ended there."""


@pytest.mark.parametrize("after", ["the engine's part", "the file"])
def test_a_save_that_ended_half_way_leaves_the_one_before(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last.ckpt` is written again and again; file and folder are of one step at any time."""
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=0, save_last=True)
    calls: list[Any] = []
    stock = pl.strategies.Strategy.save_checkpoint

    def ends(self: Any, *given: Any) -> None:
        if after == "the file":
            stock(self, *given)
        calls.append(given)
        if len(calls) == 4:
            raise Killed
        if after != "the file":
            stock(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(pl.strategies.Strategy, "save_checkpoint", ends)
        with pytest.raises(Killed):
            fitted(tmp_path, True, callbacks=[kept])
    last = str(tmp_path / "kept" / "last.ckpt")
    saved = torch.load(last, weights_only=False)
    learner, trainer = Learner(), trainer_of(tmp_path / "again", True, max_steps=saved["global_step"] + 1)
    trainer.fit(learner, loader(30), ckpt_path=last)
    assert trainer.strategy.engine.steps == trainer.global_step == saved["global_step"] + 1
    assert saved["global_step"] == (4 if after == "the file" else 3)


def test_a_linked_checkpoint_goes_on_and_a_file_without_its_folder_is_refused(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", save_last="link")
    fitted(tmp_path, True, callbacks=[kept])
    last = tmp_path / "kept" / "last.ckpt"
    assert last.is_symlink()
    _, trainer = fitted(tmp_path / "again", True, str(last), max_epochs=3)
    assert trainer.strategy.engine.steps == trainer.global_step == 9
    file = last.resolve()
    alone = tmp_path / "alone.ckpt"
    alone.write_bytes(file.read_bytes())
    with pytest.raises(
        ConfigError, match=r"alone.ckpt.ebbtide, which belongs to the file .* move both together"
    ):
        fitted(tmp_path / "alone", True, str(alone), max_epochs=3)


def test_a_checkpoint_within_a_step_is_saved_as_in_stock(tmp_path: Path) -> None:
    """By a metric of validations that come between two steps."""
    found = []
    for ours in (True, False):
        kept = ModelCheckpoint(tmp_path / str(ours), monitor="val_loss/dataloader_idx_0", save_top_k=2)
        learner, _ = fitted(tmp_path, ours, callbacks=[kept], val_check_interval=0.25)
        assert len(list((tmp_path / str(ours)).glob("*.ckpt"))) == 2
        found.append((learner.seen, float(kept.best_model_score)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)


class InTwoGroups(Learner):
    def configure_optimizers(self) -> Any:
        own = list(self.parameters())
        return torch.optim.AdamW([{"params": own[:2]}, {"params": own[2:]}], lr=3e-3)


def test_a_new_trainer_tests_a_checkpoint_whatever_its_groups(tmp_path: Path) -> None:
    learner = InTwoGroups()
    trainer_of(tmp_path, True, callbacks=[ModelCheckpoint(tmp_path / "kept")]).fit(learner, loader(30))
    (file,) = (tmp_path / "kept").glob("*.ckpt")
    found = []
    for ours in (True, False):
        fresh = InTwoGroups()
        trainer = trainer_of(tmp_path / "fresh", ours)
        found.append(
            trainer.validate(fresh, loader(8, 1000), ckpt_path=str(file), verbose=False)[0]["val_loss"]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    keeps = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", monitor="train_loss", save_top_k=1)
    _, trainer = fitted(tmp_path / "run", True, callbacks=[keeps])
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert len(names) == 2 and names[1] == names[0] + ".ebbtide"
    trainer.strategy.close()


class Thawing(BaseFinetuning):
    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.model.transformer.wte)

    def finetune_function(self, *_: Any) -> None: ...


def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches"):
        EbbtideStrategy(tight() | {"accumulate": 2})
    with pytest.raises(UnsupportedError, match=r"engine\.ema"):
        fitted(tmp_path, True, callbacks=[StochasticWeightAveraging(1e-3)])
    for other in (EMAWeightAveraging(), Thawing()):
        with pytest.raises(UnsupportedError, match=type(other).__name__):
            fitted(tmp_path, True, callbacks=[other])
    with pytest.raises(UnsupportedError, match=r"EbbtideStrategy\(\{'clip_value'"):
        fitted(tmp_path, True, gradient_clip_algorithm="value")


@pytest.mark.parametrize(
    ("told", "own", "expected"),
    [
        ("bf16-mixed", {}, "bf16"),
        ("bf16-true", {}, "bf16"),
        (None, {}, "fp32"),
        (None, {"precision": "bf16"}, "bf16"),
    ],
)
def test_precision_is_the_trainers_where_the_settings_name_none(
    told: str | None, own: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, True, precision=told, max_steps=1, strategy=EbbtideStrategy(tight() | own))
    learner = Learner()
    trainer.fit(learner, loader(12))
    assert trainer.strategy.engine.config.precision == expected
    assert trainer.precision == ("32-true" if expected == "fp32" else "bf16-mixed")
    trainer.strategy.close()


def test_precisions_that_the_engine_has_not_are_refused(tmp_path: Path) -> None:
    for precision, own, said in (
        ("64-true", {}, r"Trainer\(precision='64-true'\) by DoublePrecision"),
        ("bf16-mixed", {"precision": "fp32"}, "leave one out"),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=said):
            trainer_of(tmp_path, True, precision=precision, strategy=EbbtideStrategy(tight() | own))


def test_models_that_others_have_placed_are_refused(tmp_path: Path) -> None:
    learner = Learner()
    learner.model.hf_device_map = {"": 0}
    with pytest.raises(UnsupportedError, match="device_map"):
        trainer_of(tmp_path, True).fit(learner, loader(8))


def test_more_processes_than_devices_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started, as WORLD_SIZE says"):
        trainer_of(tmp_path, True)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match=r"device\.kind is 'cuda', the Trainer has chosen 'cpu'"):
        strategy = EbbtideStrategy({"device": {"kind": "cuda", "memory": "1GB"}})
        trainer_of(tmp_path, True, strategy=strategy).fit(Learner(), loader(8))


def test_a_trainer_validates_fits_and_fits_again_as_in_stock(tmp_path: Path) -> None:
    """Each fit has optimizers of its own."""
    found = []
    for ours in (True, False):
        learner = Learner()
        trainer = trainer_of(
            tmp_path / str(ours), ours, max_epochs=1, accumulate_grad_batches=1, callbacks=[LearningRateMonitor()],
            logger=CSVLogger(tmp_path), log_every_n_steps=1,
        )  # fmt: skip
        first = trainer.validate(learner, loader(8, 1000), verbose=False)[0]["val_loss"]
        trainer.fit(learner, loader(16), loader(8, 1000))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(learner, loader(16), loader(8, 1000))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append((first, learner.seen, metrics))
        if ours:
            trainer.strategy.close()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6) and len(found[0][1]) == 8
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-6) and "lr-AdamW" in found[0][2]


def test_the_next_trainer_takes_the_module_as_in_stock(tmp_path: Path) -> None:
    found = []
    for ours in (True, False):
        learner, trainer = fitted(tmp_path / str(ours), ours)
        other = trainer_of(tmp_path / f"next-{ours}", ours)
        other.fit(learner, loader(30))
        found.append((learner.seen, trainer, other))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1].strategy.engine.closed
    module = found[0][2].strategy.engine.release()
    assert all(type(one) is torch.nn.Parameter for one in module.parameters())


# -- several ranks ------------------------------------------------------------------------------------


class Told(Learner):
    """Ranks tell each other within their steps."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_all", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.model(**batch).loss
        self.log("val_all", loss, sync_dist=True)
        self.log("val_most", self.all_gather(loss).max(), sync_dist=True, reduce_fx="max")


def on_ranks(
    folder: str, ours: bool, lora: bool, resume: str | None
) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor], list[Any]]:
    """What torchrun would start, or Lightning by itself."""
    with as_torchrun_says() as rank:
        keeps = ModelCheckpoint(
            dirpath=Path(folder) / "kept", filename="{epoch}", save_top_k=2, monitor="epoch"
        )
        own = {} if ours else {"strategy": "ddp"}
        learner = Told(lora)
        trainer = trainer_of(Path(folder), ours, devices=2, callbacks=[keeps], **own)
        trainer.fit(learner, loader(30), [loader(8, 1000), loader(8, 2000)], ckpt_path=resume)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(learner, loader(9, 3000))  # two batches of one rank, one of the other
        state = trainer.strategy.engine.state_dict() if ours else learner.state_dict()
        weights = {name: value.clone() for name, value in state.items()}
        if ours:
            trainer.strategy.close()
    assert len(predicted) == 2 - rank
    return learner.seen, metrics, weights, predicted


@pytest.mark.parametrize("lora", some([False, True], 1))
def test_on_two_ranks_it_trains_as_stock_does_and_goes_on(lora: bool, tmp_path: Path) -> None:
    group = group_of(2)
    whole, stock = (
        group.run(on_ranks, str(tmp_path / str(ours)), ours, lora, None) for ours in (True, False)
    )
    for (seen, metrics, weights, predicted), expected in zip(whole, stock, strict=True):
        assert seen == pytest.approx(expected[0], rel=1e-6)
        assert metrics == pytest.approx(expected[1], rel=1e-6)
        for key, value in expected[2].items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=2e-5)
        assert all(map(torch.equal, predicted, expected[3])) and len(predicted) == len(expected[3])
    names = sorted(path.name for path in (tmp_path / "True" / "kept").iterdir())
    assert names == [f"epoch={epoch}.ckpt{end}" for epoch in (0, 1) for end in ("", ".ebbtide")]
    middle = str(tmp_path / "True" / "kept" / "epoch=0.ckpt")
    again = group.run(on_ranks, str(tmp_path / "again"), True, lora, middle)
    for later, first in zip(again, whole, strict=True):
        same(later[2], first[2])
        assert later[0] == first[0][len(first[0]) // 2 :]
    plain = Learner.load_from_checkpoint(tmp_path / "True" / "kept" / "epoch=1.ckpt", lora=lora)
    same(dict(plain.state_dict()), whole[0][2])


class ByHand(Learner):
    """Two batches an update, and a schedule, all in `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch)
        self.manual_backward(loss / 2)
        self.log("train_loss", loss)
        self.seen.append(loss.item())
        if batch_idx % 2:
            self.optimizers().step()
            self.lr_schedulers().step()
            self.optimizers().zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


class Choosy(Learner):
    """Every third batch is left out, as where a loss is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 0 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            super().on_train_batch_end(outputs, batch, batch_idx)


class ByPytorch(ByHand):
    """`loss.backward()` and not `self.manual_backward(loss)`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch)
        (loss / 2).backward()
        self.seen.append(loss.item())
        if batch_idx % 2:
            self.optimizers().step()
            self.lr_schedulers().step()
            self.optimizers().zero_grad()


class OwnBackward(Learner):
    """A tenth of each gradient arrives."""

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        (loss * 0.1).backward()


@pytest.mark.parametrize("kind", [ByHand, Choosy, ByPytorch, OwnBackward])
def test_steps_of_ones_own_train_as_stock_does(kind: type[Learner], tmp_path: Path) -> None:
    own = {"accumulate_grad_batches": 1} | ({"gradient_clip_val": None} if issubclass(kind, ByHand) else {})
    ours, stock = kind(), kind()
    trainer = trainer_of(tmp_path / "ours", True, **own)
    trainer.fit(ours, loader(32))
    trainer_of(tmp_path / "stock", False, **own).fit(stock, loader(32))
    assert ours.seen == pytest.approx(stock.seen, rel=1e-5) and len(ours.seen) > 8
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(trainer.strategy.engine.state_dict()[key], value, rtol=1e-4, atol=2e-5)
    trainer.strategy.close()


def test_a_backward_of_ones_own_in_fp16_is_refused(tmp_path: Path) -> None:
    settings = tight() | {"precision": "fp16"}
    trainer = trainer_of(tmp_path, True, strategy=EbbtideStrategy(settings))
    with pytest.raises(UnsupportedError, match=r"OwnBackward.backward in fp16: the engine scales"):
        trainer.fit(OwnBackward(), loader(8))
    trainer.strategy.close()


class Direct(ByHand):
    def forward(self, batch: Any) -> torch.Tensor:
        raise AssertionError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.model(**batch).loss)


def test_by_hand_a_part_that_is_called_alone_is_refused_by_name(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, True, gradient_clip_val=None, accumulate_grad_batches=1)
    with pytest.raises(UnsupportedError, match="called by itself"):
        trainer.fit(Direct(), loader(8))
    trainer.strategy.close()


class Nothing(pl.LightningModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["input_ids"].sum()


def test_a_module_without_parameters_needs_no_engine(tmp_path: Path) -> None:
    found = trainer_of(tmp_path, True).predict(Nothing(), loader(8))
    assert [int(one) for one in found] == [int(batch["input_ids"].sum()) for batch in loader(8)]


def test_a_job_that_slurm_would_start_again_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, True, max_steps=1)
    environment = trainer._accelerator_connector.cluster_environment
    monkeypatch.setattr(environment, "auto_requeue", True, raising=False)
    with pytest.warns(EbbtideWarning, match=r"SLURMEnvironment\(auto_requeue=False\)"):
        trainer.fit(Learner(), loader(8))
    monkeypatch.setattr(environment, "auto_requeue", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EbbtideWarning)
        trainer_of(tmp_path, True, max_steps=1).fit(Learner(), loader(8))
