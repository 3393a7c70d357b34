"""One process a device, as Lightning starts them: what its Trainer asks of a strategy beside the module's passes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only

from ebbtide.errors import ConfigError
from ebbtide.integrations import _lightning as private
from ebbtide.runtime.distributed.launch import launched
from ebbtide.tracing.symbolic.escapes import imagining


class LightningRanks(ParallelStrategy):
    """With one device there is one process, which knows of no others."""

    num_nodes = 1
    """Lightning sets it."""

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- processes ------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """A script that no launcher started is started by Lightning once for each further device."""
        assert self.cluster_environment is not None and self.parallel_devices is not None
        count = len(self.parallel_devices)
        if count * self.num_nodes > 1:
            self._launcher = private.Launcher(self.cluster_environment, count, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Lightning calls it as soon as it knows the devices."""
        assert self.cluster_environment is not None and self.parallel_devices is not None
        here, started = len(self.parallel_devices), launched()[0]
        if started not in (1, here * self.num_nodes):
            raise ConfigError(
                f"Trainer(devices={here}, num_nodes={self.num_nodes}): {started} processes were started, as WORLD_SIZE "
                f"says. Expected devices={started // self.num_nodes}, one for each process"
            )
        self.cluster_environment.set_global_rank(self.node_rank * here + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * here)
        vars(rank_zero_only)["rank"] = self.global_rank

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed and not dist.is_initialized():
            assert self.cluster_environment is not None
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            backend = "nccl" if self.root_device.type == "cuda" else "gloo"
            dist.init_process_group(backend, rank=self.global_rank, world_size=self.world_size)

    # -- what ranks tell each other -------------------------------------------------------------------

    def barrier(self, *_: Any, **__: Any) -> None:
        if self.is_distributed and dist.is_initialized():
            dist.barrier(device_ids=[self.local_rank] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (self.is_distributed and dist.is_initialized()):
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """In an imagined pass there are no values, and no others that wait for them."""
        if not self.is_distributed or not isinstance(tensor, torch.Tensor) or imagining():
            return tensor
        name = str(reduce_op or "mean").rpartition(".")[2].upper()  # of a ReduceOp, too
        mean = name in ("MEAN", "AVG")
        found = tensor.clone()
        dist.all_reduce(found, getattr(dist.ReduceOp, "SUM" if mean else name), group)
        return found / dist.get_world_size(group) if mean else found

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if self.is_distributed and imagining():
            return torch.stack([tensor] * dist.get_world_size(group))
        return super().all_gather(tensor, group, sync_grads)
