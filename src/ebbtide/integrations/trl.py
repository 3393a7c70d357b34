"""TRL's trainers, with the model in an ebbtide engine.

    from ebbtide.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, args, train_dataset=data, ebbtide={"device": {"memory": "20GB"}})

They are TRL's own with `Mixin` before them (`ebbtide.integrations.transformers`). A reference model becomes a second,
frozen engine within the same budgets.
"""

from __future__ import annotations

from typing import Any

import torch
import trl

from ebbtide.errors import BudgetError, UnsupportedError
from ebbtide.integrations import _trl as private
from ebbtide.integrations._versions import require
from ebbtide.integrations.transformers import Mixin

require("trl", private.OLDEST, private.NEWEST)


class TrlMixin(Mixin):
    """Before a trainer of TRL's."""

    def create_accelerator_and_postprocess(self) -> None:
        if getattr(self.args, "activation_offloading", False):
            raise UnsupportedError(
                f"{type(self.args).__name__}(activation_offloading): TRL tells weights by their memory, which "
                "chunks share. Say ebbtide={'offload_activations': 'all'} in its place"
            )
        if getattr(self.args, "sync_ref_model", False):
            raise UnsupportedError(
                f"{type(self.args).__name__}(sync_ref_model): its callback writes into weights that may be away. "
                "Leave it out, and update the reference in a callback: with trainer.references[0].resident(write=True)"
            )
        super().create_accelerator_and_postprocess()


class SFTTrainer(TrlMixin, trl.SFTTrainer):
    """trl.SFTTrainer; `ebbtide=` has the engine's settings."""


class RewardTrainer(TrlMixin, trl.RewardTrainer):
    """trl.RewardTrainer, likewise."""


class DPOTrainer(TrlMixin, trl.DPOTrainer):
    """trl.DPOTrainer, likewise."""

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Before training; without a reference of its own the model itself is evaluated, so it needs its engine."""
        if self.engine is None and self.ref_model is None:
            self.create_optimizer()
        return super()._precompute_ref_logps(*args, **kwargs)


class GRPOTrainer(TrlMixin, trl.GRPOTrainer):
    """trl.GRPOTrainer, likewise. It generates with all weights on the device where those have room beside what is
    computed; else, and in the least budget, chunks come and go for each token."""

    def create_accelerator_and_postprocess(self) -> None:
        self._stays = self._settings.device.memory != "least"
        """Whether weights may stay on the device for the next generation."""
        if getattr(self.args, "use_vllm", False):
            raise UnsupportedError(
                "GRPOConfig(use_vllm): vLLM would have a second copy of the weights on the device, outside the budgets. "
                "Leave it out: the model generates by itself, within them"
            )
        super().create_accelerator_and_postprocess()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            self.create_optimizer()
        assert self.engine is not None
        alone = self.accelerator.num_processes == 1  # several ranks go from token to token together
        if alone and self._stays:
            drawn = torch.get_rng_state(), torch.cuda.get_rng_state_all()
            try:
                with self.engine.resident():
                    return super()._generate_single_turn(*args, **kwargs)
            except BudgetError:
                self._stays = False
                torch.set_rng_state(drawn[0])
                torch.cuda.set_rng_state_all(drawn[1])
        return super()._generate_single_turn(*args, **kwargs)
