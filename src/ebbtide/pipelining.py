"""Stages of torch's pipelines whose modules an engine trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ebbtide.engine import Engine
from ebbtide.errors import ConfigError, UnsupportedError
from ebbtide.memory.dtensors import is_split

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


class Stage(PipelineStage):
    """A PipelineStage for ScheduleGPipe and Schedule1F1B, whose module an engine trains.

    One run of the schedule, with all its micro-batches, is one pass of the engine: traced and planned as a whole. Then
    `engine.step()`. `input_args` and `output_args` say shapes and dtypes of one micro-batch, for the engine's module is
    not to be copied or run to find out. `group`: the processes of all stages, one each, as `initialize(stages=)` had it.
    """

    def __init__(
        self,
        engine: Engine,
        stage_index: int,
        num_stages: int,
        input_args: Tensors,
        output_args: Tensors,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        _refuse(engine, num_stages, group)
        self.engine = engine
        super().__init__(
            engine.module,
            stage_index,
            num_stages,
            engine.device,
            _described(input_args, stage_index > 0),
            _described(output_args, True),
            group=group,
        )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_backward:
            with torch.no_grad():
                return self.engine(*args, **kwargs)
        return self.engine.forward_of_pass(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        if not full_backward:
            raise _halves()
        return super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        raise _halves()

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        with self.engine.backpropagating(last=last_backward):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Gradients are divided where the optimizer takes them."""
        self.engine.pieces = grad_scale_factor

    def clear_runtime_states(self) -> None:
        """The schedule begins; what it began before and did not end is given up."""
        self.engine.abandon_pass()
        super().clear_runtime_states()


def _halves() -> UnsupportedError:
    return UnsupportedError(
        "the schedule runs backward in halves (zero bubble), of which the engine sees no end; use ScheduleGPipe or "
        "Schedule1F1B"
    )


def _described(given: Tensors, with_gradient: bool) -> tuple[torch.Tensor, ...]:
    """Shapes and dtypes, and whether gradients go back: newer releases of torch read that off them."""
    tensors = given if isinstance(given, tuple) else (given,)
    if any(is_split(one) for one in tensors):
        raise UnsupportedError(
            "a stage's input or output is a DTensor; make it local before it leaves the stage"
        )
    return tuple(
        torch.empty_like(one, device="meta").requires_grad_(with_gradient and one.is_floating_point())
        for one in tensors
    )


def _refuse(engine: Engine, stages: int, group: dist.ProcessGroup | None) -> None:
    config, companions = engine.config, engine._session.companions
    known = None if companions is None or companions.stages is None else companions.stages.group
    if stages != dist.get_world_size(group):
        raise UnsupportedError(
            f"a process has one stage of a pipeline: expected {dist.get_world_size(group)} stages, found {stages}"
        )
    if stages > 1 and (
        known is None or dist.get_process_group_ranks(known) != dist.get_process_group_ranks(group)
    ):
        raise ConfigError(
            "the engine does not know of the pipeline's other stages, with which it clips and skips steps: expected "
            "initialize(..., stages=) with the same group"
        )
    if config.precision == "fp16":
        raise UnsupportedError(
            'precision = "fp16" scales the loss, which a pipeline\'s schedule has; use precision = "bf16"'
        )
    if config.accumulate != 1:
        raise ConfigError(
            f"accumulate: a pipeline's schedule accumulates by its micro-batches; expected 1, found {config.accumulate}"
        )
