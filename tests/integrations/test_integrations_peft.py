"""Adapters by PEFT on a frozen base in chunks, trained by Trainer, beside stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Trainer as Stock

import ebbtide
from ebbtide import forecast
from ebbtide.integrations.transformers import Trainer
from test_integrations_transformers import Rows, arguments, build, close_to, same, tight

LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
KINDS: dict[str, Any] = {
    "lora": LoraConfig(**LORA),
    "dora": LoraConfig(**LORA, use_dora=True),
    "saved modules": LoraConfig(**LORA, modules_to_save=["ln_f"]),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def adapted(name: str) -> Any:
    model = build()
    torch.manual_seed(7)
    made = get_peft_model(model, KINDS[name])
    for parameter in made.parameters():
        if (
            parameter.requires_grad and not parameter.any()
        ):  # LoRA's second factor begins at zero: nothing would differ
            torch.nn.init.normal_(parameter, std=0.02)
    return made


def trained(kind: Any, name: str, folder: Path, resume: str | None = None, **more: Any) -> Any:
    own = {"ebbtide": tight() | {"device": {"kind": "cpu", "memory": "least"}}} if kind is Trainer else {}
    given = arguments(folder, learning_rate=1e-2, **more)
    trainer = kind(adapted(name), given, train_dataset=Rows(30), eval_dataset=Rows(8, 1000), **own)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_stock_does_and_saves_the_adapter_alone(name: str, tmp_path: Path) -> None:
    ours, stock = trained(Trainer, name, tmp_path / "a"), trained(Stock, name, tmp_path / "b")
    close_to(ours, stock)
    for trainer, where in ((ours, "ours"), (stock, "stock")):
        trainer.save_model(str(tmp_path / where))
    files = [{path.name for path in (tmp_path / where).iterdir()} for where in ("ours", "stock")]
    assert files[0] == files[1]
    found, expected = (
        load_file(tmp_path / where / "adapter_model.safetensors") for where in ("ours", "stock")
    )
    assert set(found) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
    read = PeftModel.from_pretrained(build(), tmp_path / "ours")
    assert read.peft_config
    ours.close()


def test_it_goes_on_bit_for_bit_and_loads_its_best(tmp_path: Path) -> None:
    whole = trained(Trainer, "lora", tmp_path / "whole", save_strategy="steps", save_steps=2)
    again = trained(Trainer, "lora", tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-2"))
    same(again.engine.state_dict(), whole.engine.state_dict())
    whole.close()
    again.close()
    best: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    ours, stock = (
        trained(kind, "lora", tmp_path / kind.__module__, load_best_model_at_end=True, **best)
        for kind in (Trainer, Stock)
    )
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)
    ours.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_what_is_trained_has_gradients_and_state_and_so_it_is_foreseen(precision: str) -> None:
    """The base's tensors lie between the adapter's, and in no chunk with them."""
    model = adapted("lora")
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    device = {"kind": "cpu", "memory": "1GB"}
    config = {"precision": precision, "device": device, "host": {"memory": 0}, "chunk_size": "32KiB"}
    ids = torch.stack([Rows(2)[place]["input_ids"] for place in range(2)])
    example = {"input_ids": ids, "labels": ids}
    foreseen = forecast(model, "pc-8gb", example=example, config=config).outlook.bytes
    engine = ebbtide.initialize(model, config)
    for _ in range(2):
        engine.backward(model(**example).loss)
        engine.step()
    found = engine.stats()["tags"]["device"]
    engine.close()
    space = 1024 * 13  # each of its tensors begins at a border of 1,024 elements
    for kind in ("momentum", "variance"):
        assert 4 * trained <= found[kind] <= 4 * (trained + space)
    state = sum(found.get(kind, 0) for kind in ("master", "momentum", "variance"))
    assert sum(tier.get("state", 0) for tier in foreseen.values()) == state
    frozen = sum(one.numel() for one in model.parameters()) - trained
    assert found["param"] >= (frozen + trained) * (4 if precision == "fp32" else 2)


def test_an_adapter_is_switched_off_and_merged(tmp_path: Path) -> None:
    ours = trained(Trainer, "lora", tmp_path, max_steps=2)
    ids = Rows(1)[0]["input_ids"][None]
    with torch.no_grad(), ours.model.disable_adapter():
        torch.testing.assert_close(ours.model(input_ids=ids).logits, build().eval()(input_ids=ids).logits)
    with torch.no_grad():
        before = ours.model(input_ids=ids).logits
        with ours.engine.resident(write=True):
            ours.model.merge_adapter()
        torch.testing.assert_close(ours.model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)
        with ours.engine.resident(write=True):
            ours.model.unmerge_adapter()
        torch.testing.assert_close(ours.model(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)
    ours.close()
