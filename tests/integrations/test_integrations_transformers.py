"""Hugging Face's Trainer with the model in an engine, beside the stock one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
    TrainingArguments,
)
from transformers import Trainer as Stock

import ebbtide
from ebbtide.errors import BudgetError, ConfigError, UnsupportedError
from ebbtide.integrations._models import PREPARED
from ebbtide.integrations.transformers import Mixin, Trainer
from sampling import some

VOCABULARY, LENGTH = 256, 24


def build(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False))


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, first: int = 0) -> None:
        self._count, self._first = count, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(self._first + place)
        ids = torch.randint(4, VOCABULARY, (LENGTH,), generator=drawn)
        labels = ids.clone()
        labels[: place % 5] = -100  # so that batches differ in the tokens that count
        return {"input_ids": ids, "labels": labels}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return TrainingArguments(**given | more)


@cache
def tight() -> dict[str, Any]:
    """A budget of activations and a quarter of model data."""
    config = {"precision": "fp32", "device": {"kind": "cpu", "memory": "1GB"}, "host": {"memory": 0}}
    engine = ebbtide.initialize(build(), config)
    batch = torch.stack([Rows(4)[place]["input_ids"] for place in range(4)])
    for _ in range(2):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    stats = engine.stats()
    engine.close()
    memory = stats["non_model_peak"] + sum(stats["tags"]["device"].values()) // 4
    return {"device": {"kind": "cpu", "memory": memory}, "host": {"memory": "64MB"}, "chunk_size": "32KiB"}


def trained(
    kind: Any, folder: Path, resume: Any = None, rows: int = 30, callbacks: Any = None, **more: Any
) -> Any:
    """Thirty rows are eight batches: windows of three, three and two."""
    own = {"ebbtide": tight()} if issubclass(kind, Mixin) else {}
    trainer = kind(
        build(),
        arguments(folder, **more),
        train_dataset=Rows(rows),
        eval_dataset=Rows(10, 1000),
        callbacks=callbacks,
        **own,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    engine = getattr(trainer, "engine", None)
    return engine.state_dict() if engine is not None else trainer.model.state_dict()


def close_to(one: Any, other: Any, rounding: float = 1e-9) -> None:
    """Logs of both, entry by entry; `rounding`: what a loss may differ by whatever it is."""
    ours, stock = one.state.log_history, other.state.log_history
    assert len(ours) == len(stock)
    for mine, its in zip(ours, stock, strict=True):
        assert set(mine) == set(its)
        for key, tolerance in {"loss": 1e-6, "grad_norm": 1e-4, "eval_loss": 1e-6}.items():
            if key in mine:
                assert mine[key] == pytest.approx(its[key], rel=tolerance, abs=rounding), key
        for key in ("learning_rate", "epoch", "step", "eval_accuracy"):
            assert mine.get(key) == its.get(key), key


SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "never clipped": {"max_grad_norm": 0.0},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2},
    "noisy embeddings": {"neftune_noise_alpha": 5.0},
    "smoothed": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "one by one": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    "linear": {"lr_scheduler_type": "linear", "warmup_steps": 0, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "metric_for_best_model": "eval_loss",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "learning_rate": 0.1,
    },
    "never below": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
    "warm, stable, decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
    },
    "evaluated in parts": {"eval_strategy": "epoch", "eval_accumulation_steps": 1, "eval_on_start": True},
    "the best is saved": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
    },
    "weights are saved alone": {"save_strategy": "epoch", "save_total_limit": 1, "save_only_model": True},
    "by workers": {"dataloader_num_workers": 2, "dataloader_drop_last": True},
    "every second layer is checkpointed": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    "tokens are counted": {"average_tokens_across_devices": False, "include_num_input_tokens_seen": "all"},
}


@pytest.mark.parametrize("name", some(SETTINGS, 9))
def test_it_trains_as_stock_does(name: str, tmp_path: Path) -> None:
    ours = trained(Trainer, tmp_path / "ours", **SETTINGS[name])
    close_to(ours, trained(Stock, tmp_path / "stock", **SETTINGS[name]))
    found = ours.engine.stats()
    assert found["peak_bytes"]["device"] <= tight()["device"]["memory"]
    assert found["moved_bytes"]["host_to_device"] > 0
    ours.engine.close()


def test_fp16_scales_its_own_losses(tmp_path: Path) -> None:
    ours = trained(Trainer, tmp_path, fp16=True)
    assert ours.engine.config.precision == "fp16" and ours.engine.loss_scale > 1
    assert ours.accelerator.scaler is None
    assert all(math.isfinite(entry["loss"]) for entry in ours.state.log_history if "loss" in entry)
    same(
        weights_of(ours), {key: value.float() for key, value in weights_of(ours).items()}
    )  # masters are fp32
    ours.engine.close()


def test_it_stops_early_where_stock_does(tmp_path: Path) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 1.0}
    found = []
    for kind in (Trainer, Stock):
        stopping = [EarlyStoppingCallback(early_stopping_patience=1)]
        found.append(trained(kind, tmp_path / kind.__module__, callbacks=stopping, **more, **best))
    assert found[0].state.global_step == found[1].state.global_step < found[1].state.max_steps
    assert found[0].state.best_model_checkpoint.endswith(
        found[1].state.best_model_checkpoint.rpartition("/")[2]
    )
    found[0].engine.close()


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions[:, :-1] == found.label_ids[:, 1:]).mean())}


def test_metrics_are_stocks(tmp_path: Path) -> None:
    found = []
    for kind, own in ((Trainer, {"ebbtide": tight()}), (Stock, {})):
        given = arguments(tmp_path, num_train_epochs=1, eval_strategy="steps", eval_steps=1)
        sets = {"train_dataset": Rows(30), "eval_dataset": {"a": Rows(6, 1000), "b": Rows(7, 2000)}}
        how = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda x, _: x.argmax(-1)}
        trainer = kind(build(), given, **how, **sets, **own)
        trainer.train()
        found.append(trainer)
    close_to(*found)
    said = [
        [row[key] for row in one.state.log_history for key in sorted(row) if "accuracy" in key]
        for one in found
    ]
    assert said[0] == said[1] and len(said[0]) == 6
    found[0].close()


class Listening(TrainerCallback):
    """What it hears, of which step, and with which objects."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, list[str]]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hear(_: Any, state: Any, control: Any, **given: Any) -> None:
            self.heard.append((name, state.global_step, sorted(given)))

        return hear


def test_callbacks_hear_what_they_hear_of_stock(tmp_path: Path) -> None:
    heard = []
    for kind in (Trainer, Stock):
        listening = Listening()
        more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = trained(kind, tmp_path / kind.__module__, callbacks=[listening], **more)
        heard.append(listening.heard)
        if kind is Trainer:
            trainer.close()
    assert heard[0] == heard[1] and len(heard[0]) > 30


def test_each_trial_of_a_search_has_a_model_of_its_own(tmp_path: Path) -> None:
    """As hyperparameter_search goes about it."""
    found: list[list[float]] = []
    for kind, own in ((Trainer, {"ebbtide": tight()}), (Stock, {})):
        trainer = kind(
            None, arguments(tmp_path, max_steps=2), train_dataset=Rows(30), model_init=lambda: build(), **own
        )
        found.append([])
        for rate, steps in ((1e-2, 3), (1e-3, 1), (1e-2, 3)):
            trainer.args.learning_rate, trainer.args.gradient_accumulation_steps = rate, steps
            found[-1].append(trainer.train().training_loss)
        if kind is Trainer:
            trainer.close()
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0][0] == found[0][2] != found[0][1]


# -- checkpoints --------------------------------------------------------------------------------------


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("sampler", ["a seed of its own", "the generator of all"])
def test_resumed_in_the_middle_it_is_as_if_it_had_never_stopped(sampler: str, tmp_path: Path) -> None:
    """In the midst of an epoch, whatever the order of rows is drawn from."""
    own = {"accelerator_config": {"use_seedable_sampler": sampler == "a seed of its own"}}
    whole = trained(Trainer, tmp_path / "whole", save_strategy="steps", save_steps=2, **own)
    expected, logs = weights_of(whole), whole.state.log_history
    whole.engine.close()
    again = trained(Trainer, tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-2"), **own)
    same(weights_of(again), expected)
    kept = [{k: v for k, v in entry.items() if k in ("loss", "grad_norm", "learning_rate")} for entry in logs]
    found = again.state.log_history
    assert [
        {k: v for k, v in entry.items() if k in ("loss", "grad_norm", "learning_rate")} for entry in found
    ] == kept
    again.engine.close()


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
        "learning_rate": 5e-2,  # so that the last is not the best
        "max_grad_norm": 0.0,
    }
    ours, its = (
        trained(Trainer, tmp_path / "ours", **settings),
        trained(Stock, tmp_path / "stock", **settings),
    )
    assert ours.state.best_global_step == its.state.best_global_step < ours.state.global_step
    assert ours.evaluate()["eval_loss"] == pytest.approx(its.evaluate()["eval_loss"], rel=1e-5)
    assert len(list((tmp_path / "ours").glob("checkpoint-*"))) == len(
        list((tmp_path / "stock").glob("checkpoint-*"))
    )
    ours.engine.close()


def test_what_it_saves_is_ready_for_from_pretrained(tmp_path: Path) -> None:
    ours, its = trained(Trainer, tmp_path / "a", max_steps=2), trained(Stock, tmp_path / "b", max_steps=2)
    ours.save_model(str(tmp_path / "ours"))
    its.save_model(str(tmp_path / "stock"))
    files = {path.name for path in (tmp_path / "stock").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == files
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
            (tmp_path / "stock" / name).read_text()
        )
    sizes = [(tmp_path / one / "model.safetensors").stat().st_size for one in ("ours", "stock")]
    assert sizes[0] == sizes[1], "tied heads are written once"
    read = GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    same(dict(read.state_dict()), weights_of(ours))
    ours.engine.close()


def test_bf16_is_saved_in_fp32_as_stock_has_it(tmp_path: Path) -> None:
    ours = trained(Trainer, tmp_path / "run", max_steps=2, bf16=True)
    assert ours.engine.config.precision == "bf16"
    ours.save_model(str(tmp_path / "saved"))
    read = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert read.dtype == torch.float32
    same(dict(read.state_dict()), weights_of(ours))
    ours.engine.close()


def test_it_goes_on_from_a_stock_checkpoint(tmp_path: Path) -> None:
    whole = trained(Stock, tmp_path / "stock", save_strategy="steps", save_steps=2)
    ours = trained(Trainer, tmp_path / "ours", resume=str(tmp_path / "stock" / "checkpoint-2"))
    close_to(ours, whole)
    ours.engine.close()


def test_stock_says_that_it_cannot_go_on_from_ours(tmp_path: Path) -> None:
    trained(Trainer, tmp_path / "ours", max_steps=2, save_strategy="steps", save_steps=2).engine.close()
    with pytest.raises(Exception, match="MomentsAreInTheFolderEbbtide"):
        trained(Stock, tmp_path / "stock", resume=str(tmp_path / "ours" / "checkpoint-2"))


# -- what users rely on -------------------------------------------------------------------------------


def test_a_batch_that_is_too_large_is_made_smaller(tmp_path: Path) -> None:
    ours = trained(
        Trainer, tmp_path, per_device_train_batch_size=8, auto_find_batch_size=True, max_steps=2, rows=16
    )
    assert ours._train_batch_size < 8 and ours.state.global_step == 2
    ours.engine.close()


def test_it_evaluates_and_predicts_without_training(tmp_path: Path) -> None:
    trainer = Trainer(build(), arguments(tmp_path), eval_dataset=Rows(10, 1000), ebbtide=tight())
    stock = Stock(build(), arguments(tmp_path), eval_dataset=Rows(10, 1000))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-6)
    found, expected = trainer.predict(Rows(6, 2000)), stock.predict(Rows(6, 2000))
    torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(expected.predictions))
    assert trainer.engine is not None
    trainer.engine.close()


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    class Weighted(Stock):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().clamp(0))
            return (loss, logits) if return_outputs else loss

    class Ours(Mixin, Weighted):
        pass

    ours, its = (
        trained(Ours, tmp_path / "a", num_train_epochs=1),
        trained(Weighted, tmp_path / "b", num_train_epochs=1),
    )
    close_to(ours, its)
    ours.engine.close()


def test_an_optimizer_and_a_schedule_of_ones_own(tmp_path: Path) -> None:
    found = []
    for kind, own in ((Trainer, {"ebbtide": tight()}), (Stock, {})):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        trainer = kind(
            model,
            arguments(tmp_path, num_train_epochs=1),
            train_dataset=Rows(30),
            optimizers=(optimizer, schedule),
            **own,
        )
        trainer.train()
        found.append(trainer)
    close_to(*found)
    found[0].engine.close()


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "optim": ({"optim": "adafactor"}, {}, "optim='adafactor'"),
    "full eval": ({"bf16_full_eval": True}, {}, "bf16_full_eval"),
    "compile": ({"torch_compile": True}, {}, "torch_compile"),
    "clip": ({}, {"clip": 1.0}, "max_grad_norm"),
    "accumulate": ({}, {"accumulate": 2}, "gradient_accumulation_steps"),
    "optimizer": ({}, {"optimizer": {"lr": 1.0}}, "learning_rate"),
    "precision": ({"bf16": True}, {"precision": "fp32"}, "leave one out"),
    "both ways to clip": ({}, {"clip_value": 0.5}, "max_grad_norm=0"),
    "in backward and clipping": ({}, {"updates": "in-backward"}, "max_grad_norm=0"),
    "a name that is wrong": ({}, {"devise": {}}, "device"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_go_together_is_refused_by_name(name: str, tmp_path: Path) -> None:
    more, own, said = BAD[name]
    with pytest.raises((ConfigError, UnsupportedError), match=said):
        Trainer(build(), arguments(tmp_path, **more), train_dataset=Rows(4), ebbtide=tight() | own)


def test_models_that_others_have_placed_are_refused(tmp_path: Path) -> None:
    for mark, value in (
        ("hf_device_map", {"": 0}),
        ("quantization_method", "gptq"),
        ("is_loaded_in_4bit", True),
        ("_is_accelerate_prepared", True),
    ):
        model = build()
        setattr(model, mark, value)
        with pytest.raises(UnsupportedError, match="the model"):
            Trainer(model, arguments(tmp_path), train_dataset=Rows(4), ebbtide=tight())


def test_checkpointing_that_offloads_by_itself_is_refused(tmp_path: Path) -> None:
    model = build()
    model.activation_checkpointing_enable(offload=True)
    with pytest.raises(UnsupportedError, match="'offload_activations': 'checkpoints'"):
        Trainer(model, arguments(tmp_path), train_dataset=Rows(4), ebbtide=tight())
    asked = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(UnsupportedError, match="offload=True"):
        trained(Trainer, tmp_path, **asked)


def test_a_model_with_a_part_in_an_engine_is_refused(tmp_path: Path) -> None:
    model = build()
    engine = ebbtide.initialize(model.transformer, tight())
    with pytest.raises(ConfigError, match="another engine"):
        Trainer(model, arguments(tmp_path), train_dataset=Rows(4), ebbtide=tight()).train()
    engine.close()


def test_precision_is_what_the_launcher_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    ours = trained(Trainer, tmp_path, max_steps=1)
    assert ours.engine.config.precision == "bf16"
    ours.engine.close()
    with pytest.raises(ConfigError, match="leave one out"):
        Trainer(build(), arguments(tmp_path), train_dataset=Rows(4), ebbtide=tight() | {"precision": "fp32"})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UnsupportedError, match="mixed_precision fp8"):
        Trainer(build(), arguments(tmp_path), train_dataset=Rows(4), ebbtide=tight())


def test_a_launcher_that_asks_for_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedError, match="leave --use_fsdp out"):
        Trainer(build(), given, train_dataset=Rows(4), ebbtide=tight())


def test_a_budget_that_is_too_small_says_so_before_the_first_step(tmp_path: Path) -> None:
    small = {"device": {"kind": "cpu", "memory": 60_000}, "host": {"memory": "64MB"}}
    trainer = Trainer(build(), arguments(tmp_path), train_dataset=Rows(30), ebbtide=small)
    with pytest.raises(BudgetError, match=r"device\.memory"):
        trainer.train()
    assert trainer.engine is None and trainer.state.global_step == 0


def test_another_trainer_of_the_same_model_resumes_in_the_middle(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    first = trained(Trainer, tmp_path, **saved)
    whole = {name: value.clone() for name, value in weights_of(first).items()}
    other = Trainer(
        first.model, arguments(tmp_path / "other", **saved), train_dataset=Rows(30), ebbtide=tight()
    )
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same(weights_of(other), whole)


def test_the_next_trainer_takes_the_model_as_in_stock(tmp_path: Path) -> None:
    losses = {}
    for kind in (Stock, Trainer):
        model, own = build(), {"ebbtide": tight()} if kind is Trainer else {}
        trainers = [
            kind(model, arguments(tmp_path / f"{kind.__module__}{place}"), train_dataset=Rows(30), **own)
            for place in range(2)
        ]
        for trainer in trainers:
            trainer.train()
        losses[kind] = [trainer.state.log_history[-1]["train_loss"] for trainer in trainers]
        losses[kind].append(trainers[1].evaluate(Rows(8, 1000))["eval_loss"])
        if kind is Trainer:
            assert trainers[0].engine.closed
            with pytest.warns(UserWarning, match="whose moments begin anew"):
                trainers[0].train()
            module = trainers[0].engine.release()
            assert all(type(one) is torch.nn.Parameter for one in module.parameters())
            assert module(**{key: value[None] for key, value in Rows(3)[2].items()}).loss.isfinite()
    assert losses[Trainer] == pytest.approx(losses[Stock], rel=1e-6)


def test_the_second_trainer_of_a_model_saves_the_dtype_that_it_came_in(tmp_path: Path) -> None:
    model = build()
    for place in range(2):
        args = arguments(tmp_path / str(place), bf16=True, max_steps=2)
        trainer = Trainer(model, args, train_dataset=Rows(30), ebbtide=tight())
        trainer.train()
        trainer.save_model()
        read = GPT2LMHeadModel.from_pretrained(tmp_path / str(place))
        assert read.dtype == torch.float32
        same(dict(read.state_dict()), weights_of(trainer))
    trainer.close()


def test_a_model_that_was_released_goes_into_another_trainer(tmp_path: Path) -> None:
    first = trained(Trainer, tmp_path, max_steps=1)
    module = first.engine.release()
    assert not hasattr(module, PREPARED)
    other = Trainer(module, arguments(tmp_path, max_steps=1), train_dataset=Rows(30), ebbtide=tight())
    other.train()
    assert other.engine.steps == 1
    other.close()


def test_weights_alone_go_into_the_model_that_is_trained(tmp_path: Path) -> None:
    """`model_init` builds another one when training begins."""
    saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "max_steps": 2}
    trained(Trainer, tmp_path / "first", **saved).close()
    found = []
    for kind, own in ((Trainer, {"ebbtide": tight()}), (Stock, {})):
        trainer = kind(
            model_init=lambda: build(),
            args=arguments(tmp_path / kind.__name__, learning_rate=0.0, weight_decay=0.0, max_steps=3),
            train_dataset=Rows(30),
            eval_dataset=Rows(10, 1000),
            **own,
        )
        trainer.evaluate()
        trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
        found.append(trainer.evaluate()["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_the_best_model_of_a_kind_that_is_stored_in_another_form(tmp_path: Path) -> None:
    """Mixtral's experts have other names in its files than in the module."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args = arguments(
        tmp_path, **settings, load_best_model_at_end=True, learning_rate=5e-2, max_steps=3, max_grad_norm=0.0
    )
    own = {"device": {"memory": "64MB"}, "host": {"memory": "64MB"}, "precision": "fp32"}
    trainer = Trainer(
        MixtralForCausalLM(config),
        args,
        train_dataset=Rows(30),
        eval_dataset=Rows(10, 1000),
        ebbtide=own,
    )
    trainer.train()
    assert trainer.state.best_global_step < trainer.state.global_step
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
    trainer.close()


# -- what others compare with -----------------------------------------------------------------------


@dataclass
class Logs:
    """Of a rank, as `close_to` looks at them."""

    log_history: list[dict[str, Any]]

    @property
    def state(self) -> Logs:
        return self
