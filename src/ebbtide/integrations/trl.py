"""TRL's trainers, with the model in an ebbtide engine.

    from ebbtide.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, args, train_dataset=data, ebbtide={"device": {"memory": "20GB"}})

They are TRL's own with `Mixin` before them (`ebbtide.integrations.transformers`). A reference model becomes a second,
frozen engine within the same budgets.
"""

from __future__ import annotations

from typing import Any

import trl

from ebbtide.errors import UnsupportedError
from ebbtide.integrations.transformers import Mixin


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
