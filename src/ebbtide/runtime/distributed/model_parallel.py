"""Processes that have the rest of a model: other parts of its tensors, or other stages of it.

Chunks hold what a process has of the model, and a communication group shares chunks of the same. What is true of whole
tensors, such as the sum of squares of a gradient, or of the whole model, such as the norm, is known once the companions
have said theirs. Whatever they do together they do in one order: parts of tensors first, stages last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ebbtide.config import Config
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.memory.dtensors import is_split
from ebbtide.runtime.distributed.ranks import Ranks, all_or_none, among, host

ALIKE = ("accumulate", "clip", "clip_value", "nonfinite", "precision")
"""Settings that are about the whole model."""
Groups = Mapping[tuple[int, ...], tuple[Any, list[str]]]
"""By the processes of a group: the group, and the names of the parameters that are cut among them."""


class ModelParallel:
    def __init__(
        self, groups: Groups, stages: dist.ProcessGroup | None, sharing: Sequence[int], ranks: Ranks | None
    ) -> None:
        """`sharing`: the processes that share this one's chunks, which are `ranks` where they are several."""
        self._groups = [(Ranks(group), names) for group, names in groups.values()]
        self.stages = None if stages is None or dist.get_world_size(stages) == 1 else Ranks(stages)
        self._members: list[list[int]] = []
        here = dist.get_rank()
        hosts, parts = {here: host()}, {tuple(sharing)}
        for one in [*([] if ranks is None else [ranks]), *self._all]:
            for their_hosts, their_parts in one.objects((hosts, parts)):
                hosts, parts = hosts | their_hosts, parts | their_parts
        found = sorted(parts)
        self.first = found[0] == tuple(sharing)
        """Whether this process has the first part: one of those that have it writes for all."""
        self.label = f"part-{found.index(tuple(sharing))}-of-{len(found)}"
        """Which part of the model this process has."""
        self.neighbours = among(hosts, here)
        """Which of the processes on this machine that train the model this one is, and how many they are."""

    @property
    def split(self) -> bool:
        """Whether there are other parts of tensors."""
        return bool(self._groups)

    @property
    def parts(self) -> list[Ranks]:
        """By how tensors are cut: the processes that have their other parts."""
        return [ranks for ranks, _ in self._groups]

    @property
    def _all(self) -> list[Ranks]:
        return self.parts + ([] if self.stages is None else [self.stages])

    def know(self, names: Sequence[str]) -> None:
        """By which numbers parameters are known from now on."""
        number = {name: place for place, name in enumerate(names)}
        self._members = [[number[name] for name in cut if name in number] for _, cut in self._groups]

    def require_alike(self, config: Config) -> None:
        if config.updates != "exact":
            raise UnsupportedError(
                f'updates = "{config.updates}" decides by what one process sees; a model that tensor parallelism or a '
                'pipeline has divided takes updates = "exact"'
            )
        for ranks in self._all:
            ranks.require_same({key: getattr(config, key) for key in ALIKE})

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What is raised within on one is raised on all."""
        with ExitStack() as stack:
            for ranks in self._all:
                stack.enter_context(all_or_none(ranks))
            yield

    def complete(self, sums: Mapping[int, float]) -> dict[int, float]:
        """Sums of squares by parameter, of whole tensors where they were those of parts."""
        found = dict(sums)
        for (ranks, _), members in zip(self._groups, self._members, strict=True):
            if not members:
                continue
            mine = torch.tensor(
                [found.get(member, 0.0) for member in members], dtype=torch.float64, device="cpu"
            )
            rows = ranks.sums(mine)
            for number, member in enumerate(members):
                if member in found:
                    found[member] = sum(float(rows[rank, number]) for rank in range(ranks.size))
        return found

    def total(self, mine: float) -> float:
        """The sum over all stages."""
        if self.stages is None:
            return mine
        rows = self.stages.sums(torch.tensor([mine], dtype=torch.float64, device="cpu"))
        return sum(float(row[0]) for row in rows)

    def said(self, mine: str) -> str:
        """What the first one says that says anything; nothing where nobody does."""
        for ranks in self._all:
            everywhere = ranks.objects(mine)
            mine = mine or next((theirs for theirs in everywhere if theirs), "")
        return mine

    def hear(self, mine: str, flag: bool, clip: float | None, sharing: Ranks | None) -> tuple[str, bool]:
        """What one of all processes that train the model says, and whether one has the flag; all clip to one norm.
        `sharing`: those that share this one's chunks. From dimension to dimension of the mesh and back, so that all have
        heard all where not all have the same dimensions, too."""
        there = [*([] if sharing is None else [sharing]), *self._all]
        for ranks in [*there, *there[-2::-1]]:
            everywhere = ranks.objects((mine, flag, clip))
            mine = mine or next((text for text, _, _ in everywhere if text), "")
            flag = any(theirs for _, theirs, _ in everywhere)
            clips = [norm for _, _, norm in everywhere]
            if not mine and len(set(clips)) > 1:
                other = next(place for place, norm in enumerate(clips) if norm != clips[0])
                mine = (
                    f"the norm to clip to is {clips[0]} on rank {ranks.members[0]} and {clips[other]} on rank "
                    f"{ranks.members[other]}"
                )
        return mine, flag

    def require_same_step(self, step: int) -> None:
        """Checkpoints of all parts are of the same step."""
        steps = {step}
        for ranks in self._all:
            steps = set().union(*ranks.objects(steps))
        if len(steps) > 1:
            raise ConfigError(
                f"load: the newest checkpoints of a model's parts are of different steps ({sorted(steps)}): a run was "
                f"ended between two of them. Load that of step {min(steps)} on all, by its folder in each part's folder"
            )


def find_model_parallel(
    module: nn.Module, group: dist.ProcessGroup | None, stages: dist.ProcessGroup | None, ranks: Ranks | None
) -> ModelParallel | None:
    """Those that have other parts of the parameters, or other `stages`; None where each process has the whole model.
    `group`: the processes that share the chunks, `ranks` where they are several."""
    groups: dict[tuple[int, ...], tuple[Any, list[str]]] = {}
    for name, parameter in module.named_parameters():
        if not is_split(parameter):
            continue
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        for place, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
            if mesh.size(place) > 1:
                others = mesh.get_group(place)
                _, names = groups.setdefault(tuple(dist.get_process_group_ranks(others)), (others, []))
                if placement.is_shard():
                    names.append(name)
    if not groups and stages is None:
        return None
    sharing = dist.get_process_group_ranks(group)
    divided = {
        key: f"other parts of {names[0] if names else 'the module'}" for key, (_, names) in groups.items()
    }
    if stages is not None:
        divided[tuple(dist.get_process_group_ranks(stages))] = "other stages"
    for key, what in divided.items():
        both = sorted(set(sharing) & set(key) - {dist.get_rank()})
        if both:
            raise ConfigError(
                f"group: processes {both} are to share chunks, but have {what}; pass those that have the same of the "
                'model, as in group=mesh["dp"].get_group() (a group of this process alone where there are no others)'
            )
    return ModelParallel(groups, stages, sharing, ranks)


def others_too(companions: ModelParallel | None) -> AbstractContextManager[None]:
    """What is raised within on one of those that have the model is raised on all."""
    return nullcontext() if companions is None else companions.all_or_none()
