"""A framework's run describes itself: steps, evaluations and checkpoints are in the folder, and a page comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import transformers

from ebbtide.errors import ConfigError
from ebbtide.integrations import lightning as for_lightning
from ebbtide.integrations.transformers import RecordRun, Trainer
from pages import lines_of, page_of
from test_integrations_lightning import Learner, loader, trainer_of
from test_integrations_transformers import Rows, arguments, build

ROOM = {"device": {"kind": "cpu", "memory": "1GB"}, "host": {"memory": 0}}


def events_of(folder: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["event"], line["step"]) for line in lines if "event" in line]


def test_trainer_records_its_run(tmp_path: Path) -> None:
    """The losses are those that it logs, though it has divided them among micro-batches."""
    run, watched = tmp_path / "run", {"eval_strategy": "epoch", "save_strategy": "epoch"}
    args = arguments(tmp_path / "out", **watched)
    data = {"train_dataset": Rows(24), "eval_dataset": Rows(8, 1000)}
    trainer = Trainer(build(), args, **data, ebbtide=ROOM, callbacks=[RecordRun(run)])
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    steps = trainer.state.global_step
    trainer.close()
    found = lines_of(run)
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert [line["loss"] for line in found] == pytest.approx(logged, rel=1e-3)
    assert found[0]["tokens"] > 0 and found[0]["grad_norm"] > 0
    kinds = [event for event, _ in events_of(run)]
    assert kinds.count("evaluated") == 2 and kinds.count("checkpoint") == 2
    assert "A step takes" in page_of(run).read_text()


def test_a_stock_trainer_is_refused_by_name(tmp_path: Path) -> None:
    run = RecordRun(tmp_path / "run")
    trainer = transformers.Trainer(build(), arguments(tmp_path), train_dataset=Rows(24), callbacks=[run])
    with pytest.raises(ConfigError, match="no engine has the model; take Trainer of ebbtide"):
        trainer.train()


def test_lightning_records_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = trainer_of(tmp_path / "out", True, callbacks=[for_lightning.RecordFit(run)])
    trainer.fit(Learner(), loader(16), loader(4, 1000))
    steps = trainer.global_step
    trainer.strategy.close()
    assert [line["step"] for line in lines_of(run)] == list(range(1, steps + 1))
    assert any(event == "evaluated" for event, _ in events_of(run)) and page_of(run).exists()


def test_a_stock_strategy_is_refused_by_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {"callbacks": [for_lightning.RecordFit(tmp_path)], "enable_checkpointing": False}
    trainer = pl.Trainer(
        default_root_dir=str(tmp_path), max_steps=1, logger=False, accelerator="cpu", **given
    )
    with pytest.raises(ConfigError, match="take EbbtideStrategy of ebbtide"):
        trainer.fit(Learner(), loader(4))
