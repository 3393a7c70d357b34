"""`ebbtide plan` and `ebbtide.forecast`: answers, wrong input, and what others measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ebbtide
from ebbtide.bench.steps import tokens
from ebbtide.cli.app import run
from ebbtide.config import Config
from ebbtide.errors import ConfigError
from ebbtide.forecasting.forecaster import Forecaster, Workload
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.outlook import look
from ebbtide.forecasting.simulation.rates import StepJob
from ebbtide.forecasting.simulation.strategies import STRATEGIES, set_up
from ebbtide.forecasting.simulation.verdict import CHANGES
from ebbtide.forecasting.simulation.walk import step_seconds
from ebbtide.models import find_model
from ebbtide.runtime.budgets import resolve_budgets
from ebbtide.runtime.planning.calls import call_of
from sampling import some

PROMISED = {
    "fits", "bytes", "params", "chunk_size", "utilisation", "step_seconds", "tokens_per_second", "tflops_per_device",
    "bound_seconds", "achieved_over_bound", "bottleneck", "margin_chunks", "max", "trace_seconds", "plan_seconds",
}  # fmt: skip
SMALL = "gpt:layers=4,hidden=256,heads=4"


@pytest.fixture
def plan(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def called(*flags: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = run(["plan", *flags])
        out, err = capfd.readouterr()
        return status, out, err

    return called


def answer(plan: Callable[..., tuple[int, str, str]], *flags: str) -> dict[str, Any]:
    status, out, err = plan(*flags, "--json")
    assert status == 0, err
    return json.loads(out.strip().splitlines()[-1])


def test_json_has_what_is_promised(plan: Callable[..., tuple[int, str, str]]) -> None:
    found = answer(plan, "--model", SMALL, "--machine", "pc-8gb", "--seq", "128", "--batch", "2")
    assert found.keys() >= PROMISED
    assert found["fits"] and found["max"] is None
    assert 0 < found["achieved_over_bound"] <= 1
    assert found["params"] == 4 * (12 * 256**2 + 13 * 256) + (50257 + 1024 + 2) * 256
    assert found["tokens_per_second"] == pytest.approx(256 / found["step_seconds"])


def test_people_get_tables_a_timeline_and_a_verdict(plan: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = plan("--model", SMALL, "--machine", "pc-8gb", "--seq", "128")
    assert status == 0
    assert "device:" in out and "one step" in out and "fits;" in out and "of the bound" in out


def test_rows_for_devices_and_for_strategies(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    flags = ["--model", SMALL, "--machine", "v100-node", "--seq", "128", "--report", str(report)]
    found = answer(plan, *flags, "--gpus", "1,2,16")
    assert [row["gpus"] for row in found["rows"]] == [1, 2, 16]
    assert found["rows"][0]["speed_up"] == 1.0
    assert found["rows"][1]["moved_bytes"]["wire"] > 0
    assert json.loads(report.read_text())["timelines"][2]["compute"]
    compared = answer(plan, *flags, "--gpus", "2", "--compare")
    assert [row["strategy"] for row in compared["rows"]] == list(STRATEGIES)
    status, out, _ = plan(*flags, "--gpus", "2", "--compare")
    assert status == 0 and "patrickstar" in out


def test_what_does_not_fit_is_an_answer(plan: Callable[..., tuple[int, str, str]]) -> None:
    flags = [
        "--model",
        "gpt-1b",
        "--machine",
        "pc-8gb",
        "--host-memory",
        "4GB",
        "--batch",
        "2",
        "--seq",
        "128",
    ]
    found = answer(plan, *flags)
    assert found["fits"] is False
    assert found["short"]["tier"] in ("device", "host") and found["short"]["bytes"] > 0
    assert found["would_fit"], "something must be said that helps"
    status, out, _ = plan(*flags)
    assert status == 0 and "does not fit" in out


def test_what_would_fit_does(plan: Callable[..., tuple[int, str, str]]) -> None:
    flags = [
        "--model",
        SMALL,
        "--machine",
        "pc-8gb",
        "--batch",
        "8",
        "--seq",
        "512",
        "--device-memory",
        "700MB",
    ]
    found = answer(plan, *flags)
    assert not found["fits"] and found["short"]["tier"] == "device"
    for change in found["would_fit"]:
        if change.startswith("--"):
            assert answer(plan, *flags, *change.split())["fits"], change
        else:
            size = change.split('"')[1]
            assert answer(plan, *flags, "--device-memory", size)["fits"], change


def test_what_would_fit_asks_for_no_more_ram_than_there_is(
    plan: Callable[..., tuple[int, str, str]],
) -> None:
    """Where the cores are the device, a small budget is of the same RAM."""
    flags = ["--model", "gpt2-tiny", "--machine", "laptop", "--seq", "64"]
    found = answer(plan, *flags, "--device-memory", "1MB")
    assert not found["fits"] and found["short"]["tier"] == "device"
    (change,) = (one for one in found["would_fit"] if "memory" in one)
    tier, size = change.split(".memory = ")
    assert tier == "device"
    assert answer(plan, *flags, "--device-memory", size.strip('"'))["fits"]


def test_the_largest_fits_and_the_next_does_not(plan: Callable[..., tuple[int, str, str]]) -> None:
    flags = ["--machine", "pc-8gb", "--seq", "128", "--device-memory", "200MB", "--host-memory", "260MB"]
    found = answer(plan, "--model", SMALL, *flags, "--find-max", "model")
    layers = found["max"]["layers"]
    assert layers > 4 and found["fits"]
    more = answer(plan, "--model", f"gpt:layers={layers + 1},hidden=256,heads=4", *flags)
    assert not more["fits"]
    batch = answer(plan, "--model", SMALL, *flags, "--find-max", "batch")["max"]["batch"]
    assert answer(plan, "--model", SMALL, *flags, "--batch", str(batch))["fits"]
    assert not answer(plan, "--model", SMALL, *flags, "--batch", str(batch + 1))["fits"]


def test_a_machine_measured_in_another_precision_is_noted() -> None:
    machine = Machine.read("laptop")
    measured = replace(machine, device=replace(machine.device, precision="fp32"))
    for one, precision, noted in (
        (machine, "bf16", False),
        (measured, "fp32", False),
        (measured, "bf16", True),
    ):
        found = Forecaster(SMALL, {"precision": precision}).answer(one, Workload(1, 64), explain=False)
        assert any("measured in fp32" in note for note in found.notes) == noted


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--machine", "pc-9gb"], "did you mean 'pc-8gb'"),
        (["--machine", "none.toml"], "none.toml"),
        (["--machine", "pc-8gb", "--gpus", "0"], "--gpus"),
        (["--machine", "pc-8gb", "--gpus", "two"], "--gpus"),
        (["--machine", "v100-node", "--gpus", "12"], "multiple of the 8 devices"),
        (["--machine", "pc-8gb", "--batch", "0"], "--batch"),
        (["--machine", "pc-8gb", "--seq", "4096"], "longer than the context"),
        (["--machine", "pc-8gb", "--strategy", "patrickstr"], "did you mean 'patrickstar'"),
        (["--machine", "pc-8gb", "--find-max", "layers"], "--find-max"),
        (["--machine", "pc-8gb", "--device-memory", "8"], "--find-max"),
        (["--machine", "pc-8gb", "--min-tflops", "-1"], "--min-tflops"),
        (["--machine", "pc-8gb", "--clip", "1", "--updates", "in-backward"], "--clip"),
    ],
)
def test_wrong_input_is_one_message(
    plan: Callable[..., tuple[int, str, str]], flags: list[str], said: str
) -> None:
    if flags[-2] == "--device-memory":
        flags = [*flags, "--find-max", "model"]
    status, _, err = plan("--model", SMALL, *flags)
    assert status == 2
    assert said in err and len(err.strip().splitlines()) == 1


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def test_modules_and_functions_that_build_them() -> None:
    example = {"x": torch.empty(8, 64, device="meta")}
    for model in (Own(), Own):
        found = ebbtide.forecast(model, "laptop", example=example, tokens=8)
        assert found.fits and found.params == 4 * (64 * 64 + 64)
    with pytest.raises(ConfigError, match="example"):
        ebbtide.forecast(Own(), "laptop")
    with pytest.raises(ConfigError, match="strategy"):
        ebbtide.forecast("gpt2-tiny", "laptop", strategy="magic")


def test_options_change_what_they_should() -> None:
    """Checkpoints, offload, lock-free updates and accumulation, on a machine where activations are tight."""
    machine = Machine.read("pc-8gb")
    forecaster = Forecaster("gpt:layers=12,hidden=512,heads=8")
    plain = forecaster.answer(machine, Workload(4, 512), explain=False).outlook
    checked = forecaster.answer(machine, Workload(4, 512, True), explain=False).outlook
    away = forecaster.answer(machine, Workload(4, 512, offload_activations=True), explain=False).outlook
    assert checked.bytes["device"]["non-model"] < plain.bytes["device"]["non-model"]
    assert checked.must_seconds["compute"] > plain.must_seconds["compute"]
    assert away.bytes["device"]["non-model"] < plain.bytes["device"]["non-model"]
    assert away.bytes["host"]["activations"] > 0
    assert away.moved_bytes["device_to_host"] >= away.bytes["host"]["activations"]

    def with_settings(**settings: object) -> Any:
        made = Forecaster("gpt:layers=12,hidden=512,heads=8", settings)
        small = machine.with_memory(device=1_500_000_000)
        return made.answer(small, Workload(2, 512), explain=False).outlook

    once, thrice = with_settings(), with_settings(accumulate=3)
    assert thrice.step_seconds > 2 * once.step_seconds  # one update for three passes
    free = with_settings(updates="lock-free")
    assert free.staleness is not None and 1 <= free.staleness <= Config().max_staleness
    assert free.step_seconds <= once.step_seconds


CPU = {
    "name": "small",
    "device": {"kind": "cpu", "memory": "40MB", "flops": "100G", "bandwidth": "10GB/s"},
    "host": {"memory": "40MB", "cores": 2, "bandwidth": "10GB/s", "update": "1GB/s"},
    "ssd": {"memory": "1GB", "read": "3GB/s", "write": "3GB/s", "total": "3GB/s"},
    "links": {"host_device": "10GB/s"},
}


def test_more_memory_of_a_cpu_is_more_ram() -> None:
    """What would lift a forecast is tried on a machine whose RAM is stated twice."""
    found = ebbtide.forecast("gpt2-tiny", CPU, seq=64, config={"updates": "in-backward"})
    assert found.fits and found.bottleneck in CHANGES
    assert all(lift.faster > 1 for lift in found.lifts)


def test_lock_free_updates_of_what_is_all_on_the_device() -> None:
    """There is nothing to be behind with, and nothing that is moved for them."""
    forecaster = Forecaster("gpt2-tiny", {"updates": "lock-free"})
    question = forecaster.question(Machine.read("v100-node").with_devices(1), Workload(1, 64), "ebbtide")
    found = look(question, quick=True)
    assert found.fits and found.staleness == 1
    assert found.moved_bytes["ssd_read"] == found.moved_bytes["ssd_write"] == 0


def test_lock_free_updates_where_ram_is_one_tier() -> None:
    """What has been added to waits is given back though no update has consumed it."""
    tight = CPU | {"device": CPU["device"] | {"memory": "30MB"}, "host": CPU["host"] | {"memory": "30MB"}}
    found = ebbtide.forecast("gpt2-tiny", tight, seq=64, config={"updates": "lock-free"})
    assert found.fits and found.bytes["ssd"]["state"] > 0


SPLITS = (
    (40, 100, 0),
    (30, 60, 0),
    (30, 45, 1000),
    (30, 30, 1000),
    (26, 0, 1000),
    (36, 0, 1000),
    (90, 0, 1000),
)
"""Of RAM, in MB: the device's, what is beside it, and SSD."""
TINY = Forecaster("gpt2-tiny")


@given(
    split=st.sampled_from(SPLITS),
    staleness=st.integers(1, 8),
    update=st.sampled_from(["200MB/s", "1GB/s", "20GB/s"]),
    disk=st.sampled_from(["100MB/s", "3GB/s"]),
    kind=st.sampled_from(["cpu", "cuda"]),
    master=st.sampled_from(["split", "separate"]),
)
@settings(max_examples=40, deadline=None)
def test_no_lock_free_step_is_shorter_than_its_bound(
    split: tuple[int, int, int], staleness: int, update: str, disk: str, kind: str, master: str
) -> None:
    """Updates take cores, memory and disk, however far behind they may be."""
    device, beside, ssd = split
    ram = device * (kind == "cpu") + beside
    machine = CPU | {
        "device": CPU["device"] | {"kind": kind, "memory": f"{device}MB"},
        "host": CPU["host"] | {"memory": f"{max(1, ram)}MB", "update": update},
        "ssd": CPU["ssd"] | {"memory": f"{ssd}MB"} | dict.fromkeys(("read", "write", "total"), disk),
    }
    config = {"updates": "lock-free", "max_staleness": staleness, "master": master}
    question = TINY.question(Machine.read(machine), Workload(1, 64), "ebbtide")
    ask = replace(question.ask, config=Config.read(config))
    found = look(replace(question, ask=ask), quick=True)
    if found.fits:
        assert found.achieved_over_bound <= 1 + 1e-9
        assert 1 <= found.staleness <= staleness


def test_what_lock_free_updates_stream_is_added_to_what_the_passes_read_from_ssd() -> None:
    """Where RAM is one tier, parameters leave it, too."""
    tight = CPU | {"device": CPU["device"] | {"memory": "26MB"}, "host": CPU["host"] | {"memory": "26MB"}}
    found = ebbtide.forecast("gpt2-tiny", tight, seq=64, config={"updates": "lock-free"})
    assert found.fits and found.bytes["ssd"]["param"] > 0
    state = found.bytes["ssd"]["state"]
    rounds = 1 / found.staleness
    assert found.moved_bytes["ssd_read"] > state * rounds


def test_budgets_of_the_config_are_those_of_the_forecast() -> None:
    def asked(**config: object) -> Any:
        return ebbtide.forecast("gpt2-tiny", "v100-node", gpus=1, seq=64, config=config)

    tight = {"memory": "16MB"}
    small = asked(device={"memory": "1MB"})
    assert not small.fits and small.short.tier == "device"
    assert asked(device=tight).bytes["host"]["state"] > 0
    assert not asked(device=tight, host={"memory": "1MB"}).fits
    assert asked(device=tight, offload_activations="all").bytes["host"]["activations"] > 0
    unheeded = asked(device=tight, offload_activations="checkpoints")
    assert "activations" not in unheeded.bytes["host"]
    assert any("offload_activations" in note for note in unheeded.notes)
    # Of SSD a config that does not speak says none, and the machine has some.
    machine = Machine.read("pc-24gb").with_memory(device=32 * 10**6, host=32 * 10**6)
    on_ssd = ebbtide.forecast("gpt2-tiny", machine, seq=64)
    assert on_ssd.bytes["ssd"]["state"] > 0 and any("ssd.memory" in note for note in on_ssd.notes)
    assert not ebbtide.forecast("gpt2-tiny", machine, seq=64, config={"ssd": {"memory": "1MB"}}).fits


def test_activations_sent_away_by_the_workload_or_by_the_config_take_as_long() -> None:
    """Whoever asked for it."""
    machine = Machine.read(CPU).with_memory(device=60 * 10**6, host=300 * 10**6, ssd=0)
    away = Workload(1, 512, offload_activations=True)
    asked = Forecaster("gpt2-tiny").answer(machine, away, explain=False).outlook
    settings = {"offload_activations": "all"}
    told = Forecaster("gpt2-tiny", settings).answer(machine, Workload(1, 512), explain=False).outlook
    assert asked.bytes["host"]["grad"] > 0 and asked.bytes["host"]["activations"] > 0
    assert asked.step_seconds == told.step_seconds


@pytest.mark.parametrize(("host", "tier"), [(80, "host"), (20, "ssd")])
def test_activations_leave_as_the_engine_sends_them(host: int, tier: str, tmp_path: Path) -> None:
    """To SSD where RAM is short. Budgets are so tight that the engine has to keep to what is foreseen."""
    config: dict[str, Any] = {"device": {"memory": "60MB"}, "host": {"memory": f"{host}MB"}}
    config |= {"ssd": {"memory": "200MB", "folder": str(tmp_path)}, "offload_activations": "all"}
    config["precision"] = "fp32"
    found = ebbtide.forecast("gpt2-tiny", CPU, seq=256, config=config)
    assert found.fits and found.bytes[tier]["activations"] > 30e6
    engine = ebbtide.initialize(find_model("gpt2-tiny").build(0), config)
    for _ in range(3):
        engine.backward(engine(**tokens("gpt2-tiny", 1, 256)).loss)
        engine.step()
    plan, diverged = engine._session.cursor.plan, engine.stats()["diverged"]
    engine.close()
    assert plan is not None and plan.away is not None and not diverged
    for where, count in (("host", plan.away.host_bytes), ("ssd", plan.away.stored_bytes)):
        assert found.bytes[where].get("activations", 0) == pytest.approx(count, rel=0.08)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled_blocks_are_foreseen_as_the_engine_plans_them(checkpoints: bool) -> None:
    """A block is one unit, and its gradients come at once. Nothing is compiled before the engine has planned."""
    config = {"precision": "fp32", "compile": "blocks"}
    module = find_model("gpt2-tiny").build(0)
    if checkpoints:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    engine = ebbtide.initialize(module, config)
    batch = tokens("gpt2-tiny", 2, 64)
    planned = engine._session.imagining.imagine(call_of(engine.module, engine.module, (), batch))
    engine.close()
    foreseen = Forecaster("gpt2-tiny", config)._traced(
        find_model("gpt2-tiny"), Workload(2, 64, checkpoint_activations=checkpoints), 1, "cpu", False
    )
    assert planned is not None and not foreseen.note
    assert [one.event for one in foreseen.record.moments] == [one.event for one in planned.moments]
    assert foreseen.record.arrivals == planned.arrivals
    assert foreseen.record.peak == pytest.approx(planned.peak, rel=0.02)
    written = Forecaster("gpt2-tiny", {"precision": "fp32"})._traced(
        find_model("gpt2-tiny"), Workload(2, 64, checkpoint_activations=checkpoints), 1, "cpu", False
    )
    assert len(written.record.moments) > 2 * len(foreseen.record.moments)


def test_a_flag_goes_before_the_budget_of_the_config(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text('device.memory = "1MB"\n')
    flags = [
        "--model",
        "gpt2-tiny",
        "--machine",
        "pc-8gb",
        "--seq",
        "64",
        "--config",
        str(tmp_path / "c.toml"),
    ]
    assert not answer(plan, *flags)["fits"]
    assert answer(plan, *flags, "--device-memory", "1GB")["fits"]


def test_a_search_by_seconds_tries_few_plans_and_finds_none_that_is_slower_than_by_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more memory no slower ones either. All choices with every room took half a minute, for models of millions of
    parameters, and left out those with all the room there is."""
    tried: list[StepJob] = []

    def counted(job: StepJob) -> float:
        tried.append(job)
        return step_seconds(job)

    monkeypatch.setattr("ebbtide.forecasting.simulation.outlook.step_seconds", counted)
    machine, before = Machine.read("pc-8gb"), math.inf
    for megabytes in (30, 45, 60, 80, 120):
        tried.clear()
        question = TINY.question(machine.with_memory(device=megabytes * 10**6), Workload(2, 128), "ebbtide")
        found = look(question).step_seconds
        assert found is not None and 1 < len(tried) < 40
        assert found <= (look(question, quick=True).step_seconds or 0)
        assert found <= before * (1 + 1e-6)
        before = found


@pytest.mark.parametrize("config", some([{"experts": "gathered"}, {"updates": "in-backward"}], 1))
def test_experts_are_gathered_where_the_engine_does(config: dict[str, object]) -> None:
    machine = Machine.read("v100-node").with_devices(2)
    for changed, spread in (({}, True), (config, False)):
        forecaster = Forecaster("t5:layers=4,hidden=128,heads=4,ffn=256,experts=16", changed)
        question = forecaster.question(machine, Workload(2, 128), "ebbtide")
        assert any(question.ask.model.expert) == spread == bool(question.exchanges)
        others = forecaster.question(machine, Workload(2, 128), "angel-ptm")
        assert any(others.ask.model.expert)


def test_ssd_holds_what_ram_cannot() -> None:
    machine = Machine.read("pc-24gb").with_memory(device=2 * 10**9, host=3 * 10**9)
    forecaster = Forecaster("gpt2-350m")
    found = forecaster.answer(machine, Workload(1, 256), explain=False).outlook
    assert found.fits and found.bytes["ssd"]["state"] > 0
    assert found.moved_bytes["ssd_read"] == found.moved_bytes["ssd_write"] == found.bytes["ssd"]["state"]
    assert not forecaster.answer(machine.with_memory(ssd=0), Workload(1, 256), explain=False).outlook.fits


def test_experts_stay_with_their_ranks() -> None:
    """More ranks hold fewer experts each, and exchange tokens."""
    machine = Machine.read("v100-node")
    forecaster = Forecaster("t5:layers=4,hidden=128,heads=4,ffn=256,experts=16")
    two, eight = (
        forecaster.answer(machine.with_devices(n), Workload(2, 128), explain=False).outlook for n in (2, 8)
    )
    assert two.params == eight.params
    states = [sum(found.bytes["device"].values()) for found in (two, eight)]
    assert states[1] < states[0]
    assert eight.moved_bytes["wire"] > 0


def test_fewer_experts_than_ranks_are_had_in_slices() -> None:
    """Of half as many, a rank has half as much, and gathers the other half."""
    machine = Machine.read("v100-node").with_devices(8)
    states, gathered, owned = [], [], []
    for count in (8, 4):
        forecaster = Forecaster(f"t5:layers=4,hidden=128,heads=4,ffn=1024,experts={count}")
        question = forecaster.question(machine, Workload(2, 128), "ebbtide")
        model, found = question.ask.model, set_up("ebbtide", question.ask)
        mine = sum(t.numel for t, expert in zip(model.tensors, model.expert, strict=True) if expert)
        chunks = {
            found.layout.spans[t.name].chunk
            for t, expert in zip(model.tensors, model.expert, strict=True)
            if expert
        }
        owned.append(mine)
        states.append(sum(found.shape.state_bytes[i] for i in chunks))
        gathered.append(sum(found.shape.whole_bytes[i] for i in chunks))
    assert owned[0] == owned[1]  # of each layer, what is computed with is one expert
    assert states[1] == pytest.approx(states[0] / 2, rel=0.02)
    assert gathered[0] == 0
    assert gathered[1] == pytest.approx(2 * owned[1], rel=0.02)
    # With no divisor in common all ranks gather all of them.
    odd = Forecaster("t5:layers=4,hidden=128,heads=4,ffn=256,experts=7")
    assert not any(odd.question(machine, Workload(2, 128), "ebbtide").ask.model.expert)


FAMILY = ["gpt-1b", "gpt-2b", "gpt-4b", "gpt-6b", "gpt-8b", "gpt-10b", "gpt-12b", "gpt-15b", "gpt-18b", "gpt-20b",
          "gpt-30b"]  # fmt: skip


def largest_of_family(strategy: str, gpus: int, names: list[str]) -> str | None:
    """The largest model of the PatrickStar paper that trains at 30 TFLOPS a device or more, with some batch."""
    machine = Machine.read("v100-node").with_devices(gpus)
    best = None
    for name in names:
        forecaster = Forecaster(name, {"precision": "fp16"})
        for batch in (8, 4):
            found = look(forecaster.question(machine, Workload(batch, 1024, True), strategy), quick=True)
            if found.fits and (found.tflops_per_device or 0) >= 30:
                best = name
                break
    return best


@pytest.mark.heavy
def test_patrickstar_trains_what_its_authors_measured() -> None:
    """Published: 12B on one device; ours may be one size off, which is 15B."""
    assert largest_of_family("patrickstar", 1, ["gpt-12b", "gpt-18b"]) == "gpt-12b"


@pytest.mark.heavy
def test_patrickstar_trains_what_its_authors_measured_on_eight() -> None:
    """Published: 18B."""
    assert largest_of_family("patrickstar", 8, ["gpt-18b", "gpt-30b"]) == "gpt-18b"


@pytest.mark.heavy
def test_plain_pytorch_trains_what_the_authors_of_patrickstar_measured() -> None:
    """It may be the next, 2B."""
    assert largest_of_family("all-on-device", 1, ["gpt-1b", "gpt-4b"]) == "gpt-1b"


@pytest.mark.heavy
def test_ours_trains_at_least_what_all_others_do() -> None:
    for gpus in (1, 8):
        found = {name: largest_of_family(name, gpus, FAMILY) for name in STRATEGIES}
        order = {name: -1 if size is None else FAMILY.index(size) for name, size in found.items()}
        assert order["ebbtide"] == max(order.values()), found
        print(gpus, found)


def test_the_example_of_a_plain_loop_runs() -> None:
    path = Path(__file__).parents[2] / "examples" / "plan_a_plain_loop.py"
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "moment" in done.stdout and "on the device" in done.stdout


def test_a_card_reaches_ssd_through_the_hosts_memory() -> None:
    """Where there is none, the forecast has no SSD, and the engine says what is missing."""
    machine = Machine.read("pc-24gb").with_memory(device=32 * 10**6, host=0)
    assert machine.ssd.memory
    outlook = Forecaster(SMALL, {}).answer(machine, Workload(1, 64), explain=False).outlook
    assert not outlook.fits

    card = SimpleNamespace(
        kind="cuda",
        available=lambda: {"device": 8 << 30, "host": 8 << 30},
        capacity=lambda: {"device": 8 << 30, "host": 8 << 30},
    )
    config = Config.read({"host": {"memory": 0}, "ssd": {"folder": "/tmp", "memory": 1 << 30}})
    with pytest.raises(
        ConfigError, match=r"host\.memory: expected more than 0 where ssd\.memory is not, found 0"
    ):
        resolve_budgets(config, card)  # type: ignore[arg-type]
