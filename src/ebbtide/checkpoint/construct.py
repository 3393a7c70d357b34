"""What a module's constructor would have put into the tensors that it left on the meta device.

A Hugging Face model is built again from its config, on a tape. Any other module is taken to be built as PyTorch's
own are: children in the order of their names' registration, then `reset_parameters()` (or
`_reset_parameters()`), called by the constructor. Where a constructor does something else that names in it or versions
of tensors show, it is refused by name. What nothing shows is the order in which modules were made, and what was made and
thrown away: a child that takes another's place is drawn where that one was.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ebbtide.checkpoint.tape import Ref, Replay, Tape
from ebbtide.errors import UnsupportedError

ADVICE = "build the model on the CPU, or pass weights="
RESETS = ("reset_parameters", "_reset_parameters")
COPYING = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""They fill their layers by deep copies, so that a layer's numbers are drawn once for all."""
UNTOLD = {
    "apply", "copy_", "data", "deepcopy", "div_", "fill_", "from_pretrained", "index_copy_", "init",
    "load_state_dict", "manual_seed", "mul_", "normal", "rand", "randint", "randn", "randperm", "zero_",
} | {name for name in vars(nn.init) if name.endswith("_")}  # fmt: skip
"""Names in a constructor that set values which a module's structure does not tell."""


def meta_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Parameters, buffers and plain attributes on the meta device: (full name, owner, attribute, tensor)."""
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers, vars(owner)):
            for key, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                    yield (f"{prefix}.{key}" if prefix else key), owner, key, tensor


class Construction:
    """Values of the `wanted` meta tensors (by id), as construction on the CPU would have made them."""

    def __init__(self, module: nn.Module, wanted: Collection[int]) -> None:
        self._wanted = wanted
        self._tape = Tape()
        self._found: dict[int, Ref | torch.Tensor] = {}
        self._seen: set[int] = set()
        self._strict = any(id(p) in wanted for p in module.parameters())
        self._names: dict[int, str] = {}
        for name, _, _, tensor in meta_tensors(module):
            self._names.setdefault(id(tensor), name)
        self._tape.untouchable = {
            t.untyped_storage().data_ptr()
            for t in (*module.parameters(), *module.buffers())
            if not t.is_meta and t.numel()
        }
        self._writes = {id(tensor): tensor._version for _, _, _, tensor in meta_tensors(module)}
        """By tensor: how often the user, and his constructors, have written it in place."""
        before = torch.get_rng_state()
        try:
            self._visit("", module)
            if not torch.equal(torch.get_rng_state(), before):
                raise UnsupportedError(
                    f"{type(module).__name__}: its constructor sets the seed or draws random numbers on a device of its "
                    f"own choice; {ADVICE}"
                )
        finally:
            torch.set_rng_state(before)
        self._replay = Replay(self._tape)
        self._check(module)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._found[id(tensor)]
        made = self._replay.value(found) if isinstance(found, Ref) else found
        return made.detach().to(tensor.dtype)

    def finish(self) -> None:
        """Leaves the random number generator as construction on the CPU would have."""
        self._replay.finish()

    # -- the walk -------------------------------------------------------------------------------------

    def _visit(self, prefix: str, module: nn.Module) -> None:
        if id(module) in self._seen or not any(True for _ in meta_tensors(module)):
            return
        self._seen.add(id(module))
        if _is_pretrained(module):
            self._rebuild(prefix, module)
            return
        if self._strict:
            _refuse_untold(prefix, module)
        for name, child in module.named_children():
            self._visit(f"{prefix}.{name}" if prefix else name, child)
        self._reset(prefix, module)

    def _reset(self, prefix: str, module: nn.Module) -> None:
        reset = next((r for r in RESETS if callable(getattr(module, r, None))), None)
        if reset is not None:
            mark = len(self._tape.ops)
            before = {k: id(t) for k, t in (module._parameters | module._buffers).items()}
            with _named(prefix, module, f"{reset}()"), self._tape.recording():
                getattr(module, reset)()
            if before != {k: id(t) for k, t in (module._parameters | module._buffers).items()}:
                raise UnsupportedError(f"{_full(prefix, module)}: {reset}() replaces tensors; {ADVICE}")
            if any(op.draws for op in self._tape.ops[mark:]) and reset not in _constructor_names(module):
                del self._tape.ops[mark:]  # the constructor does not call it, so it drew nothing
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_meta:
                self._found[id(tensor)] = self._tape.ref(tensor)

    def _rebuild(self, prefix: str, module: Any) -> None:
        self._seen.update(id(child) for child in module.modules())
        default = torch.get_default_dtype()
        drawn = module.config.dtype if module.config.dtype == module.dtype else default
        with _named(prefix, module, f"{type(module).__name__}(config)"), self._tape.recording():
            torch.set_default_dtype(drawn)
            try:
                other = type(module)(copy.deepcopy(module.config))
            finally:
                torch.set_default_dtype(default)
        modules = dict(other.named_modules())
        writes = _writes_of(module)
        for name, owner, key, tensor in meta_tensors(module):
            inside = name.removesuffix(key).removesuffix(".")
            twin = getattr(modules.get(inside), key, None)
            if not isinstance(twin, torch.Tensor) or not _alike(twin, tensor):
                raise UnsupportedError(
                    f"{prefix}{'.' if prefix else ''}{name}: {type(module).__name__} built from its config has no such "
                    f"tensor of shape {tuple(tensor.shape)}, so the model was changed, or built from more than "
                    f"its config; {ADVICE}"
                )
            self._refuse_written(f"{prefix}.{name}" if prefix else name, tensor, writes.get(name, 0))
            known: Ref | torch.Tensor = self._tape.ref(twin) if twin.is_meta else twin.detach()
            earlier = self._found.setdefault(id(tensor), known)
            if (
                isinstance(earlier, Ref)
                and isinstance(owner._parameters.get(key), nn.Parameter)
                and earlier != known
            ):
                raise UnsupportedError(
                    f"{self._names[id(tensor)]} is tied to {name}, but not in {type(module).__name__} built from its "
                    f"config; {ADVICE}"
                )

    # -- what cannot be told --------------------------------------------------------------------------

    def _refuse_written(self, name: str, tensor: torch.Tensor, expected: int) -> None:
        """Values that were written into a tensor on the meta device are nowhere; that they were, its version tells. None
        at all: it has become another tensor since, as by `to`."""
        written = self._writes[id(tensor)]
        if written not in (0, expected):
            raise UnsupportedError(
                f"{name} was written in place {written} times on the meta device, where building its module writes it "
                f"{expected} times: what else was written is not there. Set it after initialize(), with "
                f"engine.weights(name, write=True), or {ADVICE}"
            )

    def _check(self, module: nn.Module) -> None:
        pretrained = {
            id(child) for model in module.modules() if _is_pretrained(model) for child in model.modules()
        }
        owners: dict[int, str] = {}
        for name, owner, _, tensor in meta_tensors(module):
            if id(tensor) not in self._wanted:
                continue
            first = owners.setdefault(id(tensor), name)
            free = id(owner) not in pretrained
            if first != name and free:
                raise UnsupportedError(
                    f"{first} and {name} are one tensor: which of their two initial values it kept cannot be told from "
                    f"a model on the meta device; {ADVICE}"
                )
            self._check_known(name, owner, tensor, free)
        for name, owner, _, tensor in meta_tensors(module):
            if id(owner) not in pretrained and isinstance(self._found.get(id(tensor)), Ref):
                self._refuse_written(name, tensor, tensor._version - self._writes[id(tensor)])

    def _check_known(self, name: str, owner: nn.Module, tensor: torch.Tensor, free: bool) -> None:
        found = self._found.get(id(tensor))
        if isinstance(found, torch.Tensor):
            return
        if found is None or not self._replay.require(found.storage):
            raise UnsupportedError(
                f"{name} of {type(owner).__name__} is on the meta device, and nothing tells its initial value: give "
                f"the module a reset_parameters() that sets it and that its constructor calls, or {ADVICE}"
            )
        draws = self._replay.drawn(found.storage)
        if free and draws and tensor.dtype != torch.get_default_dtype():
            raise UnsupportedError(
                f"{name} is {tensor.dtype} on the meta device: whether its numbers were drawn so or converted later "
                f"cannot be told; {ADVICE}"
            )
        if draws and not self._strict:
            raise UnsupportedError(
                f"{name}: a buffer of random numbers that the weights do not hold; {ADVICE}"
            )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.is_floating_point() == other.is_floating_point()


def _is_pretrained(module: nn.Module) -> bool:
    """A Hugging Face model; their library is not imported for it."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _writes_of(module: Any) -> dict[str, int]:
    """By name: how often building a Hugging Face model on the meta device writes its tensors in place. It draws nothing
    there, which is not what building it does elsewhere."""
    before = torch.get_rng_state()
    try:
        with torch.device("meta"):
            other = type(module)(copy.deepcopy(module.config))
    finally:
        torch.set_rng_state(before)
    return {name: tensor._version for name, _, _, tensor in meta_tensors(other)}


def _refuse_untold(prefix: str, module: nn.Module) -> None:
    if isinstance(module, COPYING) or parametrize.is_parametrized(module):
        reason = "is parametrized" if parametrize.is_parametrized(module) else "copies its layers"
        raise UnsupportedError(
            f"{_full(prefix, module)} {reason}: its random numbers cannot be repeated from the meta device; {ADVICE}"
        )
    names = _constructor_names(module)
    odd = sorted(n for n in names if n in UNTOLD or (n.lstrip("_").startswith("init") and n != "__init__"))
    if odd:
        raise UnsupportedError(
            f"{_full(prefix, module)}: its constructor uses {odd[0]!r}, so its initial values cannot be told from the "
            f"meta device; set them in a reset_parameters() that the constructor calls, or {ADVICE}"
        )


def _constructor_names(module: nn.Module) -> set[str]:
    """Names used in the constructors of a module's classes; of PyTorch's own, only those of its resets."""
    names: set[str] = set()
    for cls in type(module).__mro__:
        if cls is nn.Module or "__init__" not in vars(cls):
            continue
        code = getattr(inspect.unwrap(vars(cls)["__init__"]), "__code__", None)
        found = _names(code) if code is not None else set()
        names |= found & set(RESETS) if cls.__module__.startswith("torch.") else found
    return names


def _names(code: CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def _full(prefix: str, module: nn.Module) -> str:
    return f"{prefix} ({type(module).__name__})" if prefix else type(module).__name__


@contextmanager
def _named(prefix: str, module: nn.Module, what: str) -> Iterator[None]:
    """Whatever goes wrong on the tape is a refusal that names the module."""
    try:
        yield
    except Exception as error:
        raise UnsupportedError(
            f"{_full(prefix, module)}: {what} cannot be repeated from the meta device: {error}; {ADVICE}"
        ) from error
