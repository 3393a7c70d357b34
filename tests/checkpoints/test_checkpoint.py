"""Checkpoints: what was saved goes on bit for bit, whatever the memory is like; and nothing is ever half there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ebbtide
import reference
import zoo
from ebbtide.checkpoint import dcp_planners, folders, rank_files, shards
from ebbtide.checkpoint.folders import INDEX, RunFolder
from ebbtide.checkpoint.index import read_index
from ebbtide.devices.pool import map_memory
from ebbtide.errors import ConfigError, DiskError, IntegrityError, StateError
from ebbtide.memory.disk.extents import BLOCK
from ebbtide.units import round_up
from harness import LR, batch_of, config_of, facts

HALF, WHOLE = 3, 6
TIERS = ("all", "host", "ssd-host", "ssd")


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written from where it lies: here, all but the smallest."""
    monkeypatch.setattr(dcp_planners, "LENT", 2 * BLOCK)


def tiers(name: str, where: str, folder: Path, base: dict[str, Any]) -> dict[str, Any]:
    """Budgets that leave state on the device, the host, SSD beside a host, SSD beside RAM."""
    if where == "all":
        return base
    peak, model_data, params = facts(name, "none", base)
    ssd = {"folder": str(folder), "memory": 2 * model_data + (8 << 20)}
    folder.mkdir(parents=True, exist_ok=True)
    if where == "host":
        return base | {"device": {**base["device"], "memory": peak + model_data // 4}}
    if where == "ssd-host":
        room = {"device": {**base["device"], "memory": peak + model_data // 4}}
        return base | room | {"host": {"memory": params * 3 + (2 << 20)}, "ssd": ssd}
    memory = peak + 2 * params + model_data // 5 + (1 << 20)
    return base | {"device": {**base["device"], "memory": memory}, "host": {"memory": 0}, "ssd": ssd}


def start(name: str, config: dict[str, Any], **kwargs: Any) -> ebbtide.Engine:
    return ebbtide.initialize(zoo.build(name, **kwargs), config)


def train(engine: ebbtide.Engine, name: str, first: int, last: int, accumulate: int = 1) -> list[float]:
    dtype = reference.ROUND[engine.config.precision]
    losses = []
    for step in range(first * accumulate, last * accumulate):
        loss = engine(**batch_of(name, step, dtype, engine.device)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.check_integrity()
    return losses


def straight(name: str, config: dict[str, Any]) -> tuple[str, list[float]]:
    engine = start(name, config)
    try:
        losses = train(engine, name, 0, WHOLE)
        return engine.weights_sha256(), losses
    finally:
        engine.close()


def resumed(
    name: str, before: dict[str, Any], after: dict[str, Any], folder: Path
) -> tuple[str, list[float]]:
    """Half of the steps, a checkpoint, and the rest in an engine that began with other weights."""
    engine = start(name, before)
    try:
        train(engine, name, 0, HALF)
        engine.save(folder, {"next": HALF})
        saved = engine.weights_sha256()
    finally:
        engine.close()
    engine = start(name, after, seed=7)
    try:
        state = engine.load(folder)
        assert engine.steps == state["next"] == HALF
        assert engine.weights_sha256() == saved
        losses = train(engine, name, HALF, WHOLE)
        return engine.weights_sha256(), losses
    finally:
        engine.close()


EVERYDAY = {("gpt2", where) for where in TIERS} | {("t5", "ssd-host"), ("attention", "ssd"), ("vit", "host")}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(name, where, marks=() if (name, where) in EVERYDAY else pytest.mark.heavy)
        for name in zoo.ZOO
        for where in TIERS
    ],
)
def test_goes_on_bit_for_bit(name: str, where: str, folder: Path) -> None:
    config = tiers(name, where, folder / "ssd", config_of())
    sha, losses = straight(name, config_of())
    found, rest = resumed(name, config, config, folder / "run")
    assert found == sha and rest == losses[HALF:]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"layout": "page"}),
        ({"layout": "tensor"}, {}),
        ({}, {"master": "separate"}),
        ({"master": "separate", "layout": "page"}, {"chunk_size": "16KiB"}),
        ({"clip": None}, {"clip": None, "updates": "in-backward"}),
        ({"clip": None, "updates": "in-backward"}, {"clip": None, "prefetch": False}),
    ],
)
def test_goes_on_in_another_form(before: dict[str, Any], after: dict[str, Any], folder: Path) -> None:
    first = config_of(**before)
    second = tiers("gpt2", "ssd-host", folder / "ssd", config_of(**after))
    sha, losses = straight("gpt2", first)
    assert resumed("gpt2", first, second, folder / "run") == (sha, losses[HALF:])
    sha, losses = straight("gpt2", config_of(**after))
    assert resumed("gpt2", second, first, folder / "back") == (sha, losses[HALF:])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_other_precisions_and_their_scale(precision: str, folder: Path) -> None:
    config = config_of(precision=precision)
    sha, losses = straight("gpt2", config)
    assert resumed("gpt2", config, config, folder) == (sha, losses[HALF:])


def test_unmanaged_parameters_frozen_ones_and_buffers(folder: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.up, self.norm, self.down = (
                torch.nn.Linear(16, 64),
                torch.nn.BatchNorm1d(64),
                torch.nn.Linear(64, 1),
            )
            self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.down(self.norm(self.up(self.frozen(x)))).square().mean()

    def steps(engine: ebbtide.Engine, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            engine.backward(engine(x))
            engine.step()

    config = config_of(unmanaged=["norm.*", "down.bias"])
    whole = ebbtide.initialize(Net(0), config)
    steps(whole, 0, WHOLE)
    first = ebbtide.initialize(Net(0), config)
    steps(first, 0, HALF)
    first.save(folder)
    second = ebbtide.initialize(Net(1), config)
    second.load(folder)
    steps(second, HALF, WHOLE)
    expected, found = whole.state_dict(), second.state_dict()
    assert {"seen", "norm.running_mean", "frozen.weight"} <= set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    for engine in (whole, first, second):
        engine.close()


def test_schedulers_groups_and_random_numbers(folder: Path) -> None:
    def begin(lr: float) -> tuple[ebbtide.Engine, Any]:
        module = zoo.build("gpt2")
        biases = [p for n, p in module.named_parameters() if n.endswith("bias")]
        rest = [p for n, p in module.named_parameters() if not n.endswith("bias")]
        groups = [{"params": rest, "lr": lr}, {"params": biases, "lr": lr / 2, "weight_decay": 0.0}]
        engine = ebbtide.initialize(module, config_of(), groups)
        return engine, torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)

    def steps(engine: ebbtide.Engine, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            loss = engine(**batch_of("gpt2", random.randrange(100), torch.bfloat16, "cpu")).loss
            engine.backward(loss)
            engine.step()
            scheduler.step()
            found.append(loss.item() + float(torch.rand(())))
        return found

    random.seed(1), torch.manual_seed(1)
    engine, scheduler = begin(LR)
    steps(engine, scheduler, HALF)
    engine.save(folder, {"scheduler": scheduler.state_dict()})
    expected = steps(engine, scheduler, HALF)
    sha = engine.weights_sha256()
    engine.close()
    engine, scheduler = begin(7.0)
    scheduler.load_state_dict(engine.load(folder)["scheduler"])
    assert [group["lr"] for group in engine.optimizer.param_groups] == [LR / 2, LR / 4]
    assert steps(engine, scheduler, HALF) == expected
    assert engine.weights_sha256() == sha
    engine.close()


@pytest.mark.parametrize("when", ["after loading", "before loading"])
def test_what_was_unfrozen_goes_on(folder: Path, when: str) -> None:
    def begin() -> tuple[ebbtide.Engine, list[torch.nn.Parameter]]:
        module = zoo.build("gpt2")
        late = list(module.transformer.h[0].parameters())
        for parameter in late:
            parameter.requires_grad = False
        groups = [{"params": list(module.parameters())}]
        return ebbtide.initialize(module, config_of(layout="tensor"), groups), late

    def unfreeze(parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.requires_grad = True

    engine, late = begin()
    train(engine, "gpt2", 0, 1)
    unfreeze(late)
    train(engine, "gpt2", 1, HALF)
    engine.save(folder)
    expected = train(engine, "gpt2", HALF, WHOLE)
    sha = engine.weights_sha256()
    engine.close()
    engine, late = begin()
    if when == "before loading":
        unfreeze(late)
    engine.load(folder)
    unfreeze(late)
    assert train(engine, "gpt2", HALF, WHOLE) == expected
    assert engine.weights_sha256() == sha
    engine.close()


def test_a_trace_is_not_made_again(folder: Path) -> None:
    config = tiers("gpt2", "host", folder, config_of())
    engine = start("gpt2", config)
    train(engine, "gpt2", 0, HALF)
    engine.save(folder / "run")
    engine.close()
    engine = start("gpt2", config)
    engine.load(folder / "run")
    train(engine, "gpt2", HALF, WHOLE)
    assert engine.stats()["traces"] == 0 and not engine.stats()["diverged"]
    engine.close()


def test_a_trace_of_other_managed_parameters_is_not_used(folder: Path) -> None:
    """Records count parameters: one that was made with fewer of them would mean others."""
    config = config_of(clip=None)
    engine = start("gpt2", config | {"unmanaged": ["transformer.wpe.*", "*.ln_1.*"]})
    train(engine, "gpt2", 0, HALF)
    engine.save(folder)
    engine.close()
    sha, losses = straight("gpt2", config)
    engine = start("gpt2", tiers("gpt2", "host", folder, config))
    engine.load(folder)
    assert train(engine, "gpt2", HALF, WHOLE) == losses[HALF:]
    assert engine.weights_sha256() == sha and engine.stats()["traces"] > 0
    engine.close()


def test_what_was_there_before_loading_is_gone(folder: Path) -> None:
    """An engine that went further returns to where the checkpoint is, state that was not there yet included."""
    engine = start("gpt2", config_of())
    engine.save(folder)
    expected = train(engine, "gpt2", 0, HALF)
    engine.load(folder)
    assert engine.steps == 0
    assert train(engine, "gpt2", 0, HALF) == expected
    engine.close()


def test_in_the_middle_of_a_step_nothing_is_saved(folder: Path) -> None:
    engine = start("gpt2", config_of(accumulate=2))
    loss = engine(**batch_of("gpt2", 0, torch.bfloat16, "cpu")).loss
    engine.backward(loss)
    with pytest.raises(StateError, match="middle of a step"):
        engine.save(folder)
    engine.step()
    train(engine, "gpt2", 1, 2)
    assert not list(folder.iterdir())
    engine.close()


# -- folders ------------------------------------------------------------------------------------------------


def test_the_newest_are_kept(folder: Path) -> None:
    engine = start("gpt2", config_of())
    for step in range(4):
        train(engine, "gpt2", step, step + 1)
        found = engine.save(folder, keep=2)
    assert [one.name for one in RunFolder(folder).complete()] == ["step-00000003", "step-00000004"]
    assert RunFolder(folder).latest() == found
    folders.wait_for_removals()
    kept = ["latest", "step-00000003", "step-00000004"]
    assert sorted(p.name for p in folder.iterdir()) == [".spare", *kept]
    again = engine.save(folder)
    assert again.name == "step-00000004-1" and RunFolder(folder).latest() == again
    engine.load(folder / "step-00000003")
    assert engine.steps == 3
    engine.close()
    assert sorted(p.name for p in folder.iterdir()) == [*kept, again.name]


def test_a_run_that_went_back_keeps_what_it_writes(folder: Path) -> None:
    engine = start("gpt2", config_of())
    for step in range(3):
        train(engine, "gpt2", step, step + 1)
        engine.save(folder)
    engine.load(folder / "step-00000001")
    train(engine, "gpt2", 1, 2)
    found = engine.save(folder, keep=2)
    assert [one.name for one in RunFolder(folder).complete()] == ["step-00000003", "step-00000002-1"]
    (folder / "latest").unlink()
    assert RunFolder(folder).latest() == found
    engine.close()


def test_parts_of_a_model_keep_a_checkpoint_that_all_have(folder: Path) -> None:
    runs = [RunFolder(folder / f"part-{place}-of-2") for place in range(2)]

    def write(run: RunFolder, step: int) -> None:
        with run.writing(step) as (partial, _):
            (partial / folders.INDEX).write_text("{}")
        run.keep(1)

    for run in runs:
        write(run, 1)
    write(runs[0], 2)  # the other part's disk is full
    write(runs[0], 3)
    assert [one.name for one in runs[0].complete()] == [f"step-{step:08d}" for step in (1, 2, 3)]
    write(runs[1], 3)
    write(runs[0], 4)
    assert [one.name for one in runs[0].complete()] == ["step-00000003", "step-00000004"]
    for run in runs:
        run.remove_spare()


@pytest.mark.parametrize("call", ["mkdir", "flock", "keep"])
def test_a_folder_that_fails_is_told_as_a_disk(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def make(path: Path, *args: Any, **kwargs: Any) -> None:
        fail() if path.name.startswith(".partial") else os.makedirs(path, exist_ok=True)

    engine = start("gpt2", config_of())
    first = engine.save(folder)
    with monkeypatch.context() as broken:
        if call == "mkdir":
            broken.setattr(folders.Path, "mkdir", make)
        elif call == "flock":
            broken.setattr(folders.fcntl, "flock", fail)
        else:
            broken.setattr(RunFolder, "keep", fail)
        with pytest.raises(DiskError, match="No locks available"):
            engine.save(folder, keep=1)
    assert RunFolder(folder).latest() is not None and first.exists()
    train(engine, "gpt2", 0, 1)
    engine.save(folder, keep=1)
    engine.close()


@pytest.mark.parametrize("master", ["split", "separate"])
@pytest.mark.parametrize("where", ["all", "host", "ssd-host", "ssd"])
def test_saved_within_a_step_it_is_the_one_before_and_disturbs_nothing(
    where: str, master: str, folder: Path
) -> None:
    """As frameworks do it. Gradients that wait, in whatever place, stay with the run that goes on."""
    config = tiers("gpt2", where, folder / "tier", config_of(accumulate=3, master=master, clip=1.0))
    expected = straight_of("gpt2", config, 3)
    engine = start("gpt2", config)
    losses = train(engine, "gpt2", 0, 2, 3)
    then = engine.weights_sha256()
    dtype = reference.ROUND[engine.config.precision]
    for number in range(6, 9):
        loss = engine(**batch_of("gpt2", number, dtype, engine.device)).loss
        engine.backward(loss)
        with pytest.raises(StateError, match="in the middle of a step"):
            engine.save(folder / "run")
        engine._checkpoints.save(folder / "run", None, 1, background=False, within_step=True)
        engine.step()
        losses.append(loss.item())
    assert (engine.weights_sha256(), losses) == expected
    engine.load(folder / "run")
    assert engine.steps == 2 and engine.weights_sha256() == then
    assert train(engine, "gpt2", 2, 3, 3) == losses[6:] and engine.weights_sha256() == expected[0]
    engine.close()


@pytest.mark.parametrize("updates", ["in-backward", "lock-free"])
def test_where_updates_go_on_it_is_never_saved_within_a_step(updates: str, folder: Path) -> None:
    engine = start("gpt2", config_of(updates=updates, clip=None))
    engine.backward(engine(**batch_of("gpt2", 0, torch.bfloat16, engine.device)).loss)
    with pytest.raises(StateError, match="in the middle of a step"):
        engine._checkpoints.save(folder, None, 1, background=False, within_step=True)
    engine.step()
    engine.close()


def straight_of(name: str, config: dict[str, Any], steps: int) -> tuple[str, list[float]]:
    engine = start(name, config)
    try:
        losses = train(engine, name, 0, steps, config["accumulate"])
        return engine.weights_sha256(), losses
    finally:
        engine.close()


def test_settings_that_no_file_can_have_are_refused_and_numbers_of_numpy_taken(folder: Path) -> None:
    engine = start("gpt2", config_of())
    group = engine.optimizer.param_groups[0]
    group["lr"] = numpy.float32(0.25)
    engine.load(engine.save(folder))
    assert group["lr"] == 0.25
    group["odd"] = object()
    with pytest.raises(ConfigError, match="numbers and strings"):
        engine.save(folder)
    engine.close()


def test_a_spare_is_written_again(folder: Path) -> None:
    """The files of a checkpoint that is not kept: what they have too much of goes."""
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    engine.save(folder, keep=1)
    engine.save(folder, keep=1)
    file = folder / ".spare" / "rank-00000.bin"
    length, number = file.stat().st_size, file.stat().st_ino
    with file.open("ab") as opened:
        opened.write(bytes(1 << 20))
    (folder / ".spare" / "rank-00001.bin").write_bytes(b"another rank's")
    train(engine, "gpt2", 1, 2)
    wanted = engine.weights_sha256()
    found = engine.save(folder, keep=1)
    assert sorted(p.name for p in found.iterdir()) == ["index.json", "rank-00000.bin"]
    assert (found / "rank-00000.bin").stat().st_ino == number
    assert abs((found / "rank-00000.bin").stat().st_size - length) < 1 << 18
    engine.close()
    other = start("gpt2", config_of())
    other.load(found)
    assert other.weights_sha256() == wanted
    other.close()
    assert not (folder / ".spare").exists()


def test_a_linked_copy_is_left_alone(folder: Path) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    copy = folder / "best"
    shutil.copytree(engine.save(folder / "run", keep=1), copy, copy_function=os.link)
    sha = engine.weights_sha256()
    for _ in range(3):
        train(engine, "gpt2", 1, 2)
        engine.save(folder / "run", keep=1)
    engine.load(copy)
    assert engine.weights_sha256() == sha
    engine.close()


def test_what_the_killed_left_is_removed(folder: Path) -> None:
    left = folder / folders.partial_name()
    left.mkdir()
    (left / "rank-00000.bin").write_bytes(b"half")
    engine = start("gpt2", config_of())
    engine.save(folder)
    assert not left.exists()
    engine.close()


class Faulty(shards.SystemIO):
    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0

    def fallocate(self, file: int, size: int) -> None:
        if self.fault == "no room":
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.fault == "no fallocate":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        super().fallocate(file, size)

    def pwritev(self, file: int, buffers: Any, offset: int) -> int:
        self.calls += 1
        if self.fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.fault == "refuse" and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        if self.fault == "odd" and len(buffers[0]) > 4096 and self.calls % 2:
            return super().pwritev(file, [buffers[0][:4096]], offset) - 1  # as if a byte less had been taken
        if self.fault == "short" and len(buffers[0]) > 4096:
            return super().pwritev(file, [buffers[0][: len(buffers[0]) // 2 // 4096 * 4096]], offset)
        return super().pwritev(file, buffers, offset)


@pytest.mark.parametrize("fault", ["no room", "full"])
def test_a_full_disk_leaves_the_old_one_and_training_goes_on(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha, losses = straight("gpt2", config_of())
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    old = engine.save(folder)
    found = train(engine, "gpt2", 1, HALF)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "SystemIO", lambda: Faulty(fault))
        with pytest.raises(DiskError, match="No space left"):
            engine.save(folder)
    assert RunFolder(folder).complete() == [old] and len(list(folder.iterdir())) == 2
    assert found + train(engine, "gpt2", HALF, WHOLE) == losses[1:]
    assert engine.weights_sha256() == sha
    engine.load(folder)
    assert engine.steps == 1
    engine.close()


@pytest.mark.parametrize("fault", ["short", "odd", "refuse", "no fallocate"])
def test_short_writes_and_file_systems_without_direct_access(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    sha = engine.weights_sha256()
    with monkeypatch.context() as patch:
        patch.setattr(shards, "SystemIO", lambda: Faulty(fault))
        engine.save(folder)
    train(engine, "gpt2", 1, 2)
    engine.load(folder)
    assert engine.weights_sha256() == sha
    engine.close()


def damage(path: Path, at: int, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[at] ^= 1 << (at % 8)
    elif how == "cut":
        del content[at:]
    path.write_bytes(content)


def test_bytes_come_from_buffers_and_from_where_they_lie(folder: Path) -> None:
    """At any address, with any length, in turn."""
    draw = random.Random(0)
    memory = map_memory(1 << 20)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    file = rank_files.File(folder / "file", os.O_RDWR | os.O_CREAT, shards.SystemIO())
    expected = []
    with rank_files.Queue(file, 0) as queue:
        for _ in range(40):
            first = draw.randrange(1 << 19)
            part = memory[first : first + draw.randrange(2 * BLOCK, 1 << 19)]
            if draw.random() < 0.7:
                place = queue.lend(part)
                assert (place - part.data_ptr()) % BLOCK == 0
            else:
                buffer, place = queue.take(round_up(part.numel(), BLOCK))
                buffer[: part.numel()] = part
            expected.append((place, part))
    file.close()
    content = (folder / "file").read_bytes()
    for place, part in expected:
        assert content[place : place + part.numel()] == part.numpy().tobytes()


@pytest.mark.parametrize(("master", "pieces"), [("split", 2), ("separate", 1)])
def test_large_masters_are_written_from_where_they_lie(
    master: str, pieces: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is put together for the disk: what is split stays so, and is joined by who reads it."""
    filled = []
    fill = dcp_planners._Writing.fill

    def noted(self: Any, item: Any, memory: torch.Tensor) -> None:
        filled.append((item.index.fqn, memory.numel()))
        fill(self, item, memory)

    monkeypatch.setattr(dcp_planners._Writing, "fill", noted)
    engine = start("gpt2", config_of(master=master))
    train(engine, "gpt2", 0, 1)
    metadata = read_index(engine.save(folder))
    sha = engine.weights_sha256()
    engine.close()
    large = [i for i, s in metadata.storage_data.items() if sum(p.nbytes for p in s) >= 4 * BLOCK]
    weights = [index for index in large if index.fqn.startswith("weights/")]
    assert weights and all(len(metadata.storage_data[index]) == pieces for index in weights)
    assert not {index.fqn for index in weights} & {key for key, nbytes in filled if nbytes >= 4 * BLOCK}
    other = start("gpt2", config_of(), seed=7)
    other.load(folder)
    assert other.weights_sha256() == sha
    other.close()


@pytest.mark.parametrize("number", [3, 2, 1])
def test_formats(number: int, folder: Path) -> None:
    """Those of before had no tables, and the first had ranges in one piece, as separate masters have; any other is
    refused by its number."""
    engine = start("gpt2", config_of(master="separate"))
    train(engine, "gpt2", 0, 1)
    saved, sha = engine.save(folder), engine.weights_sha256()
    body = json.loads(json.loads((saved / INDEX).read_bytes())["body"])
    body["format"] = number
    del body["files"]
    for stored in body["tensors"].values():
        del stored["shape"], stored["stride"]
    text = json.dumps(body)
    (saved / INDEX).write_text(json.dumps({"checksum": zlib.crc32(text.encode()), "body": text}))
    train(engine, "gpt2", 1, 2)
    if number > 1:
        engine.load(folder)
        assert engine.weights_sha256() == sha
    else:
        with pytest.raises(IntegrityError, match="expected a checkpoint of format 4, found 1"):
            engine.load(folder)
    engine.close()


class RefusesTwo(shards.SystemIO):
    """Direct transfers are refused to two writers at once: to the second when the first has asked for plain ones."""

    def __init__(self) -> None:
        self._entered = threading.Barrier(2, timeout=60)
        self._turns = iter(range(2))

    def pwritev(self, file: int, buffers: Any, offset: int) -> int:
        turn = next(self._turns, None)
        if turn is None:
            return super().pwritev(file, buffers, offset)
        self._entered.wait()
        until = time.monotonic() + 60
        while turn and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT and time.monotonic() < until:
            time.sleep(0.001)
        raise OSError(errno.EINVAL, "Invalid argument")


def test_two_writers_are_refused_direct_access_at_once(folder: Path) -> None:
    memory = map_memory(4 * BLOCK)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
    file = rank_files.File(folder / "file", os.O_RDWR | os.O_CREAT, RefusesTwo())
    with rank_files.Queue(file, 0) as queue:
        places = [queue.lend(part) for part in memory.split(2 * BLOCK)]
    file.close()
    assert places == [0, 2 * BLOCK]
    assert (folder / "file").read_bytes() == memory.numpy().tobytes()


@pytest.mark.parametrize("file", ["rank-00000.bin", "index.json"])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_damage_is_found(file: str, how: str, folder: Path) -> None:
    """Every byte counts, but for what fills blocks up."""
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    whole = engine.save(folder / "run")
    pieces = [piece for several in read_index(whole).storage_data.values() for piece in several]
    used = [(piece.offset, piece.offset + piece.nbytes) for piece in pieces]
    size = (whole / file).stat().st_size
    for place in (0.0, 0.31, 0.66, 0.97, 1.0):
        copy = folder / "copy"
        shutil.copytree(whole, copy)
        at = int(place * (size - 1))
        if file.startswith("rank"):
            at = max(first for first, _ in used if first <= at)  # blocks are filled up with what nobody reads
        damage(copy / file, at, how)
        with pytest.raises(IntegrityError, match="load another checkpoint"):
            engine.load(copy)
        shutil.rmtree(copy)
    engine.load(whole)
    train(engine, "gpt2", 1, 2)
    engine.close()


def test_a_load_that_failed_half_way_is_not_trained_on(folder: Path) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    whole = engine.save(folder / "run")
    bad = folder / "bad"
    shutil.copytree(whole, bad)
    pieces = [piece for several in read_index(whole).storage_data.values() for piece in several]
    last = max(pieces, key=lambda piece: piece.offset)
    content = bytearray((bad / "rank-00000.bin").read_bytes())
    content[last.offset] ^= 1
    (bad / "rank-00000.bin").write_bytes(content)
    with pytest.raises(IntegrityError, match="checksum"):
        engine.load(bad)
    with pytest.raises(StateError, match="half-way"):
        engine(**batch_of("gpt2", 0, torch.bfloat16, "cpu"))
    engine.load(whole)
    train(engine, "gpt2", 1, 2)
    engine.close()


def test_another_model_or_other_groups_are_refused(folder: Path) -> None:
    engine = start("gpt2", config_of())
    train(engine, "gpt2", 0, 1)
    engine.save(folder)
    sha = engine.weights_sha256()
    engine.close()
    other = start("llama", config_of())
    before = other.weights_sha256()
    with pytest.raises(ConfigError, match="of another model: it has 'weights/transformer"):
        other.load(folder)
    assert other.weights_sha256() == before
    train(other, "llama", 0, 1)
    other.close()
    module = zoo.build("gpt2")
    every = list(module.parameters())
    grouped = ebbtide.initialize(module, config_of(), [{"params": every[:3]}, {"params": every[3:]}])
    with pytest.raises(ConfigError, match="param_groups"):
        grouped.load(folder)
    train(grouped, "gpt2", 0, 1)
    grouped.close()
    assert sha != before


@pytest.mark.parametrize("place", ["nothing", "empty", "file"])
def test_no_checkpoint_there(place: str, folder: Path) -> None:
    path = folder / place
    if place == "empty":
        path.mkdir()
    if place == "file":
        path.write_text("not one")
    engine = start("gpt2", config_of())
    with pytest.raises(ConfigError, match="expected a checkpoint"):
        engine.load(path)
    train(engine, "gpt2", 0, 1)
    if place == "file":
        with pytest.raises(ConfigError, match="cannot be written to"):
            engine.save(path)
    with pytest.raises(ConfigError, match="made of tensors"):
        engine.save(folder / "odd", {"object": object()})
    assert not RunFolder(folder / "odd").complete()
    train(engine, "gpt2", 1, 2)
    engine.close()
