"""Which of a module's blocks run compiled, each as one unit: those that the user compiled, or all that repeat.

A block is a module inside of the model that nothing outside of it reaches into. Where something that the user compiled
is no such block, everything runs as it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations

import torch
from torch import nn

from ebbtide.errors import warn_user
from ebbtide.memory.dtensors import is_split
from ebbtide.tracing.hooks.block_calls import CompiledBlock, CompiledBlocks
from ebbtide.tracing.hooks.compiled import has_compiler, is_compiled

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def choose_blocks(module: nn.Module, repeated: bool, apart: Collection[nn.Module]) -> CompiledBlocks:
    """`repeated`: whether all blocks that repeat are to be compiled, besides those that are. `apart`: modules that the
    engine runs in its own way (on the host, spread over ranks)."""
    if repeated:
        import torch._dynamo  # noqa: F401  (what is said of the compiler below is asked of it)
    if not has_compiler():
        return CompiledBlocks(())
    by_user = dict(_compiled_by_user(module))
    found = dict(by_user)
    if repeated:
        inside = {id(child) for block in by_user.values() for child in block.modules()}
        found |= {name: block for name, block in repeated_blocks(module) if id(block) not in inside}
        if not found:
            warn_user(
                'compile = "blocks": no two blocks of this model are alike, so it runs as it is written. Compile what '
                "takes its time with module.compile() before ebbtide.initialize()"
            )
    why = _obstacle(module, found, apart)
    if not why:
        return CompiledBlocks([_block(name, block, name in by_user) for name, block in found.items()])
    if repeated and not by_user:
        warn_user(f'compile = "blocks": the model runs as it is written: {why}')
    return CompiledBlocks((), why)


def _block(name: str, block: nn.Module, by_user: bool) -> CompiledBlock:
    return CompiledBlock(
        name, block, block._compiled_call_impl if by_user else torch.compile(block._call_impl)
    )


def _compiled_by_user(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are compiled."""
    inside: set[int] = set()
    for name, child in module.named_modules():
        if id(child) not in inside and is_compiled(child):
            inside |= {id(one) for one in child.modules()}
            yield name, child


def repeated_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules of lists in which at least two of a class are alike; with them, what else there is of it."""
    inside: set[int] = set()
    for name, parent in module.named_modules():
        if id(parent) in inside or not isinstance(parent, LISTS):
            continue
        children = dict(parent.named_children())
        kinds = {
            type(one)
            for one, other in combinations(children.values(), 2)
            if type(one) is type(other) and _alike(_shapes(one), _shapes(other))
        }
        for key, child in children.items():
            if type(child) in kinds and id(child) not in inside:
                inside |= {id(one) for one in child.modules()}
                yield f"{name}.{key}".lstrip("."), child


def _records_graphs(block: nn.Module) -> bool:
    """As the modes "reduce-overhead" and "max-autotune" do."""
    for compiled in (block._compiled_call_impl, block.forward):
        known = getattr(compiled, "get_compiler_config", None)
        if known is not None and (known() or {}).get("triton.cudagraphs"):
            return True
    return False


Shapes = dict[str, tuple[int, ...]]


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _alike(one: Shapes, other: Shapes) -> bool:
    """Whether most parameters are the same: the first of T5's blocks has one more than the others."""
    common = one.keys() & other.keys()
    return 2 * len(common) > max(len(one), len(other)) and all(one[name] == other[name] for name in common)


def _obstacle(module: nn.Module, blocks: dict[str, nn.Module], apart: Collection[nn.Module]) -> str:
    """Why these cannot be units, by the first that cannot; empty where all can."""
    special = {id(one) for one in apart}
    users: dict[int, set[int]] = {}
    for parent in module.modules():
        for child in parent.children():
            users.setdefault(id(child), set()).add(id(parent))
    for name, block in blocks.items():
        inside = {id(child) for child in block.modules()}
        if block is module:
            return "of a whole model, weights come and go while it runs, which compiled code does not show"
        if _records_graphs(block):
            return f"{name!r} is compiled to CUDA graphs, which want weights at one place: leave its mode out"
        if not special.isdisjoint(inside):
            return f"a module in {name!r} computes on the host, or has its experts spread over ranks"
        if any(is_split(parameter) for parameter in block.parameters()):
            return f"tensor parallelism has split weights of {name!r}"
        if any(not users[one] <= inside for one in inside - {id(block)} if one in users):
            return f"a module in {name!r} is part of another one, too"
    return ""
