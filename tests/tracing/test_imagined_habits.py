"""What a forward pass does beside computing is done once: with an imagined pass before it, all is as without one.

Each habit is written twice the same way: a note that forward takes of an activation, and what can be seen of the notes
afterwards. One run imagines its passes and the other must not; everything is compared.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import io
import itertools
import logging
import pickle
import random
import sys
import threading
import time
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
import torchmetrics
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from tqdm import tqdm

import ebbtide
from ebbtide.tracing.symbolic.escapes import ImaginedMode
from harness import config_of

IMAGINES = True

WIDTH = 16
Note = Callable[["Net", torch.Tensor], Any]
Seen = Callable[["Net"], Any]
LOOKING = {"a_metric_that_looks_at_values"}
"""Habits that no pass can be imagined with to its end."""
HABITS: dict[str, Callable[[Path], tuple[Note, Seen]]] = {}


class Net(nn.Module):
    made = 0

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        found = self.note(self, x)
        return (x if found is None else x + found).square().mean()


def habit(make: Callable[[Path], tuple[Note, Seen]]) -> Callable[[Path], tuple[Note, Seen]]:
    HABITS[make.__name__] = make
    return make


def train(make: Callable[[Path], tuple[Note, Seen]], place: Path, imagined: bool) -> tuple[Any, ...]:
    """What can be seen of three steps, one of them of another shape."""
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    place.mkdir()
    note, seen = make(place)
    model = Net(note)
    engine = ebbtide.initialize(
        model, config_of(precision="fp32", chunk_size="4KiB", device={"memory": 150_000}, clip=None)
    )
    if not imagined:
        engine._session.imagining.obstacle = "this run is to have no imagined pass"
    losses = []
    try:
        for rows in (4, 4, 6):
            x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            del loss
        if imagined and make.__name__ not in LOOKING:
            assert not engine._session.imagining.note
        found = seen(model)
        sha = engine.weights_sha256()
    finally:
        engine.close()
    drawn = random.random(), float(numpy.random.random()), float(torch.rand(()))
    return losses, sha, plain(found), drawn


def plain(value: Any) -> Any:
    """As it can be compared."""
    return tree_map(lambda one: one.tolist() if isinstance(one, torch.Tensor | numpy.ndarray) else one, value)


def reset() -> None:
    """What habits keep where all see it."""
    global CALLS
    CALLS = 0
    globals().pop("LATEST", None)
    Net.made = Totals.calls = 0
    KEPT.clear()
    ADDED.set(0)
    LOCAL.__dict__.clear()
    masked.cache_clear()
    logging.getLogger("of.a.user").handlers.clear()


# -- what is kept ----------------------------------------------------------------------------------------

CALLS = 0
KEPT: list[Any] = []
ADDED: ContextVar[int] = ContextVar("added", default=0)
LOCAL = threading.local()


class Totals:
    calls = 0


class Box(dict[str, Any]):
    """As libraries have them for results."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Output(OrderedDict[str, Any]):
    def __post_init__(self) -> None: ...


class Recent(list[Any]):
    def append(self, value: Any) -> None:
        super().append(value)
        del self[:-2]


class Slotted:
    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = torch.zeros(())


@dataclass
class State:
    calls: int = 0
    means: list[torch.Tensor] = field(default_factory=list)


class Metric(nn.Module):
    """As torchmetrics has them: states are attributes, and a call computes the batch's value beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.updates = torch.zeros(()), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self._defaults = {"total": torch.zeros(())}
        self._cache: Any = None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self._cache = {"total": self.total, "updates": self.updates}
        self.total = copy.deepcopy(self._defaults["total"])
        self.total = self.total + value.detach().mean()
        found = self.total
        self.total, self.updates = self._cache["total"] + found, self._cache["updates"] + 1
        self.seen += 1
        self._cache = None
        return found


@functools.lru_cache
def masked(rows: int) -> torch.Tensor:
    return torch.ones(rows, 1)


@habit
def an_attribute_that_counts(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        model.calls = getattr(model, "calls", 0) + 1

    return note, lambda model: model.calls


@habit
def a_list_and_a_deque(place: Path) -> tuple[Note, Seen]:
    kept: list[torch.Tensor] = []
    last: deque[torch.Tensor] = deque(maxlen=2)

    def note(model: Net, x: torch.Tensor) -> None:
        kept.append(x.detach().mean())
        last.append(x.detach().sum())

    return note, lambda model: (kept, list(last))


@habit
def a_list_of_another_kind(place: Path) -> tuple[Note, Seen]:
    recent = Recent()
    return lambda model, x: recent.append(x.detach().mean()), lambda model: list(recent)


@habit
def a_dict_of_another_kind(place: Path) -> tuple[Note, Seen]:
    box = Box(calls=0)

    def note(model: Net, x: torch.Tensor) -> None:
        box["calls"] += 1
        box[f"mean{box['calls']}"] = x.detach().mean()

    return note, lambda model: dict(box)


@habit
def an_ordered_dict_of_another_kind(place: Path) -> tuple[Note, Seen]:
    output = Output(first=0)

    def note(model: Net, x: torch.Tensor) -> None:
        output["mean"] = x.detach().mean()
        output.move_to_end("first")
        output.calls = getattr(output, "calls", 0) + 1  # type: ignore[attr-defined]

    return note, lambda model: (list(output.items()), vars(output))


@habit
def a_set_and_a_counter(place: Path) -> tuple[Note, Seen]:
    kinds: set[Any] = set()
    count: Counter[str] = Counter()

    def note(model: Net, x: torch.Tensor) -> None:
        kinds.add((x.shape[0], len(kinds)))
        count.update(["calls"])

    return note, lambda model: (sorted(kinds), dict(count))


@habit
def a_closure_that_counts(place: Path) -> tuple[Note, Seen]:
    calls = 0

    def note(model: Net, x: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    return note, lambda model: calls


@habit
def a_global_that_counts(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        global CALLS
        CALLS += 1
        KEPT.append(x.detach().mean())

    return note, lambda model: (CALLS, KEPT)


@habit
def a_global_that_is_new(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        global LATEST
        first = "LATEST" not in globals()
        LATEST = x.detach().mean()  # type: ignore[name-defined]
        if first:
            KEPT.append("first")

    return note, lambda model: (LATEST, KEPT)  # type: ignore[name-defined]


@habit
def a_global_of_another_module(place: Path) -> tuple[Note, Seen]:
    (place / "of_a_user.py").write_text("calls = 0\n")
    sys.modules.pop("of_a_user", None)
    sys.path.insert(0, str(place))
    of_a_user: Any = importlib.import_module("of_a_user")
    sys.path.remove(str(place))
    globals()["of_a_user"] = of_a_user

    return count_there, lambda model: of_a_user.calls


def count_there(model: Net, x: torch.Tensor) -> None:
    of_a_user.calls += 1  # type: ignore[name-defined]  # noqa: F821


@habit
def a_class_that_counts(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        type(model).made += 1
        Totals.calls += 1

    return note, lambda model: (Net.made, Totals.calls)


@habit
def a_dataclass(place: Path) -> tuple[Note, Seen]:
    state = State()

    def note(model: Net, x: torch.Tensor) -> None:
        state.calls += 1
        state.means.append(x.detach().mean())

    return note, lambda model: (state.calls, state.means)


@habit
def numbers_in_place(place: Path) -> tuple[Note, Seen]:
    counts, content = numpy.zeros(8), bytearray(8)

    def note(model: Net, x: torch.Tensor) -> None:
        counts[x.shape[0]] += 1
        content[x.shape[0]] += 1

    return note, lambda model: (counts, bytes(content))


@habit
def a_tensor_in_place_where_nothing_is_found(place: Path) -> tuple[Note, Seen]:
    slotted = Slotted()
    return lambda model, x: slotted.total.add_(1), lambda model: slotted.total


@habit
def a_buffer_of_running_means(place: Path) -> tuple[Note, Seen]:
    norm = nn.BatchNorm1d(WIDTH, affine=False)  # no child of the module
    return lambda model, x: norm(x) * 0, lambda model: dict(norm.state_dict())


@habit
def a_module_that_forward_makes(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        if not hasattr(model, "scale"):
            model.register_buffer("scale", x.detach().abs().mean(), persistent=False)
            model.kinds = [type(model.scale).__name__]

    return note, lambda model: (model.scale, model.kinds)


@habit
def a_variable_of_the_context(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        ADDED.set(ADDED.get() + 1)

    return note, lambda model: ADDED.get()


@habit
def a_variable_of_the_thread(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1

    return note, lambda model: LOCAL.calls


@habit
def a_counter_of_itertools(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        model.number = next(model.numbers)

    def prepared(model: Net, x: torch.Tensor) -> None:
        if not hasattr(model, "numbers"):
            model.numbers = itertools.count()
        note(model, x)

    return prepared, lambda model: model.number


# -- metrics, caches, queues, threads -----------------------------------------------------------------------


@habit
def a_metric(place: Path) -> tuple[Note, Seen]:
    metrics = [Metric()]

    def note(model: Net, x: torch.Tensor) -> None:
        metrics[0](x)

    return note, lambda model: (metrics[0].total, metrics[0].updates, metrics[0].seen)


@habit
def a_metric_of_torchmetrics(place: Path) -> tuple[Note, Seen]:
    kept = {
        "mean": torchmetrics.MeanMetric(nan_strategy="disable"),
        "all": torchmetrics.CatMetric(nan_strategy="disable"),
    }

    def note(model: Net, x: torch.Tensor) -> None:
        kept["mean"].update(x.detach().mean())
        kept["all"](x.detach().mean())

    return note, lambda model: (kept["mean"].compute(), kept["all"].compute())


@habit
def a_metric_that_looks_at_values(place: Path) -> tuple[Note, Seen]:
    metric, history = torchmetrics.MeanMetric(), []

    def note(model: Net, x: torch.Tensor) -> None:
        metric(x.detach().mean())
        history.append(metric.compute().item())

    return note, lambda model: (metric.compute(), metric.update_count, history)


@habit
def a_cache_of_functools(place: Path) -> tuple[Note, Seen]:
    return lambda model, x: masked(x.shape[0]), lambda model: (masked(4), masked.cache_info().currsize)


@habit
def a_cached_property(place: Path) -> tuple[Note, Seen]:
    class Tables:
        made = 0

        @functools.cached_property
        def table(self) -> torch.Tensor:
            Tables.made += 1
            return torch.arange(WIDTH) * 1.0

    tables = Tables()
    return lambda model, x: tables.table * 1e-3, lambda model: (tables.table, Tables.made)


@habit
def a_cache_of_ones_own(place: Path) -> tuple[Note, Seen]:
    found: dict[int, torch.Tensor] = {}

    def note(model: Net, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in found:
            found[len(x)] = torch.linspace(0, 1, len(x)).unsqueeze(1)
        return found[len(x)]

    return note, lambda model: found


@habit
def a_weak_dict(place: Path) -> tuple[Note, Seen]:
    known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def note(model: Net, x: torch.Tensor) -> None:
        known[model] = (known[model][0] + 1 if model in known else 1, x.detach().mean())

    return note, lambda model: known[model]


@habit
def a_queue(place: Path) -> tuple[Note, Seen]:
    queue: Queue[Any] = Queue()

    def note(model: Net, x: torch.Tensor) -> None:
        queue.put(x.detach().mean())

    return note, lambda model: ([queue.get() for _ in range(queue.qsize())], queue.unfinished_tasks)


@habit
def a_thread_that_is_told_of_real_passes(place: Path) -> tuple[Note, Seen]:
    queue: SimpleQueue[Any] = SimpleQueue()
    found: list[float] = []

    def receive() -> None:
        while (value := queue.get()) is not None:
            found.append(value.item())

    thread = threading.Thread(target=receive)
    thread.start()

    def note(model: Net, x: torch.Tensor) -> None:
        if not ebbtide.imagining():
            queue.put(x.detach().mean())

    def seen(model: Net) -> list[float]:
        queue.put(None)
        thread.join()
        return found

    return note, seen


# -- copies -------------------------------------------------------------------------------------------------


@habit
def a_deep_copy(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        first = x.detach()
        model.copies = copy.deepcopy({"one": first, "again": first, "weights": model.layers[0].weight.shape})
        assert model.copies["one"] is model.copies["again"] and model.copies["one"] is not first

    return note, lambda model: model.copies


@habit
def a_deep_copy_of_what_is_real(place: Path) -> tuple[Note, Seen]:
    slotted = Slotted()

    def note(model: Net, x: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(slotted).total + copy.deepcopy(nn.Linear(2, 2)).weight.sum() * 0

    return note, lambda model: slotted.total


@habit
def pickled(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        model.again = pickle.loads(pickle.dumps(x.detach()))
        content = io.BytesIO()
        torch.save({"x": x.detach()}, content)
        content.seek(0)
        model.saved = torch.load(content)["x"]

    return note, lambda model: (model.again, model.saved)


# -- output -------------------------------------------------------------------------------------------------


@habit
def prints(place: Path) -> tuple[Note, Seen]:
    def note(model: Net, x: torch.Tensor) -> None:
        print("a pass of", x.shape)
        print("and an error", file=sys.stderr)
        sys.stdout.write("written\n")

    return note, lambda model: None


@habit
def a_progress_bar(place: Path) -> tuple[Note, Seen]:
    bar = tqdm(total=3, mininterval=0, file=sys.stderr)

    def note(model: Net, x: torch.Tensor) -> None:
        bar.update(1)
        bar.set_postfix_str("passes")

    return note, lambda model: (bar.n, bar.close())


@habit
def logs(place: Path) -> tuple[Note, Seen]:
    logger, content = logging.getLogger("of.a.user"), io.StringIO()
    logger.addHandler(logging.StreamHandler(content))
    logger.addHandler(logging.FileHandler(place / "log"))

    def note(model: Net, x: torch.Tensor) -> None:
        logger.warning("a pass of %s", tuple(x.shape))

    return note, lambda model: (content.getvalue(), (place / "log").read_text())


@habit
def warns(place: Path) -> tuple[Note, Seen]:
    return lambda model, x: warnings.warn(f"{len(x)} rows", stacklevel=1), lambda model: None


@habit
def a_file(place: Path) -> tuple[Note, Seen]:
    text, binary = (place / "text").open("w"), (place / "binary").open("wb")

    def note(model: Net, x: torch.Tensor) -> None:
        text.write("a pass\n")
        print("another", file=text)
        binary.write(b"pass")

    def seen(model: Net) -> Any:
        text.close()
        binary.close()
        return (place / "text").read_text(), (place / "binary").read_bytes()

    return note, seen


# -- chance and hooks ---------------------------------------------------------------------------------------


@habit
def draws(place: Path) -> tuple[Note, Seen]:
    mine, theirs = random.Random(1), numpy.random.default_rng(1)
    torchs = torch.Generator().manual_seed(1)

    def note(model: Net, x: torch.Tensor) -> torch.Tensor:
        model.drawn = [mine.random(), float(theirs.random()), random.random(), float(numpy.random.random())]
        return torch.rand(len(x), 1, generator=torchs) + torch.rand(()) + sum(model.drawn)

    return note, lambda model: (
        model.drawn,
        mine.random(),
        float(theirs.random()),
        torch.rand(1, generator=torchs),
    )


@habit
def hooks_that_come_and_go(place: Path) -> tuple[Note, Seen]:
    seen: list[Any] = []

    def note(model: Net, x: torch.Tensor) -> None:
        if not seen:

            def once(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
                seen.append(output.detach().mean())
                handle.remove()

            handle = model.layers[1].register_forward_hook(once)
        seen.append(len(model.layers[1]._forward_hooks))

    return note, lambda model: seen


@habit
def hooks_of_gradients(place: Path) -> tuple[Note, Seen]:
    norms: list[torch.Tensor] = []

    def note(model: Net, x: torch.Tensor) -> None:
        x.register_hook(lambda gradient: norms.append(gradient.norm()))

    return note, lambda model: norms


@habit
def gradients_of_another_network(place: Path) -> tuple[Note, Seen]:
    other = nn.Linear(WIDTH, 1)

    def note(model: Net, x: torch.Tensor) -> torch.Tensor:
        return other(x)

    return note, lambda model: (other.weight.grad, other.bias.grad)


@habit
def exceptions_that_are_caught(place: Path) -> tuple[Note, Seen]:
    tries: list[str] = []

    def note(model: Net, x: torch.Tensor) -> None:
        try:
            tries.append("begun")
            raise ValueError("a habit")
        except ValueError as error:
            tries.append(str(error))

    return note, lambda model: tries


@pytest.mark.parametrize("name", list(HABITS))
def test_with_and_without_an_imagined_pass(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found, before = [], left_over()
    for imagined in (False, True):
        reset()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = train(HABITS[name], tmp_path / str(imagined), imagined)
        said = [str(one.message) for one in told]
        printed = capfd.readouterr()
        found.append((*result, printed.out, _steady(printed.err), said))
    reset()
    assert found[0] == found[1]
    assert not left_over() - before


def left_over() -> set[int]:
    """Tensors of imagined passes that are still there."""
    gc.collect()
    return {
        id(one)
        for one in gc.get_objects()
        if type(one) is FakeTensor and isinstance(one.fake_mode, ImaginedMode)
    }


def _steady(text: str) -> str:
    """A bar, without its seconds."""
    return "\r".join(part.split("[")[0] for part in text.split("\r"))


def test_what_another_thread_puts_into_a_queue_meanwhile_stays() -> None:
    queue: Queue[int] = Queue(2)
    seen: list[int] = []

    def produce() -> None:
        for number in range(6):
            queue.put(number)

    def note(model: Net, x: torch.Tensor) -> None:
        time.sleep(0.05)  # the other thread goes on meanwhile
        seen.append(queue.get())

    engine = ebbtide.initialize(
        Net(note), config_of(precision="fp32", chunk_size="4KiB", device={"memory": 150_000}, clip=None)
    )
    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        for rows in (4, 4, 6, 4, 5, 4):
            engine.backward(engine(torch.zeros(rows, WIDTH)))
            engine.step()
    finally:
        engine.close()
    assert seen == list(range(6))


def test_one_thing_that_cannot_be_put_back_leaves_the_others() -> None:
    class Fixed(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            if name == "calls" and value == 0 and cls.calls:
                raise TypeError("it only grows")
            super().__setattr__(name, value)

    class Growing(metaclass=Fixed):
        calls = 0

    seen: list[torch.Tensor] = []
    empty = numpy.zeros((0, 4))

    def note(model: Net, x: torch.Tensor) -> None:
        Growing.calls += 1
        seen.append(x.detach().mean() + empty.size)

    engine = ebbtide.initialize(
        Net(note), config_of(precision="fp32", chunk_size="4KiB", device={"memory": 150_000}, clip=None)
    )
    try:
        engine(torch.zeros(4, WIDTH))
        assert [type(one) for one in seen] == [torch.Tensor]
    finally:
        engine.close()


def test_what_escapes_is_named() -> None:
    """Kept where the engine does not look: a queue that only C knows."""
    queue: SimpleQueue[Any] = SimpleQueue()
    kept: Any = Slotted()

    def note(model: Net, x: torch.Tensor) -> None:
        kept.total = x.detach()
        queue.put(None)

    engine = ebbtide.initialize(
        Net(note), config_of(precision="fp32", chunk_size="4KiB", device={"memory": 150_000}, clip=None)
    )
    try:
        with pytest.warns(UserWarning, match=r"pass that was only imagined.*Slotted.*imagining\(\)"):
            engine(torch.zeros(4, WIDTH))
    finally:
        engine.close()
    assert ebbtide.imagining() is False
