"""Every private name of Lightning that the strategy relies on, in one place, and the methods that it replaces.

`tests/integrations/test_integrations_contract.py` looks each of them up, and says which one moved.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as Launcher

OLDEST, NEWEST = (2, 5), (2, 6)
"""Versions of lightning that are known to work."""

OVERRIDDEN = (
    "root_device",
    "distributed_sampler_kwargs",
    "_configure_launcher",
    "setup_environment",
    "barrier",
    "broadcast",
    "reduce",
    "all_gather",
    "precision_plugin",
    "model_to_device",
    "setup",
    "teardown",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "on_predict_end",
    "restore_checkpoint_after_setup",
    "lightning_restore_optimizer",
    "lightning_module_state_dict",
    "optimizer_state",
    "save_checkpoint",
    "remove_checkpoint",
    "load_checkpoint",
    "load_model_state_dict",
)
"""Of ParallelStrategy."""
SET = ("num_nodes", "set_world_ranks", "_layer_sync")
"""Of a strategy: what the Trainer sets or calls where a strategy has it."""
PRECISION = ("backward", "optimizer_step", "clip_grad_by_norm", "clip_grad_by_value", "_wrap_closure")
"""Of the plugin: what is replaced, and what is called."""
LAUNCHER, LAUNCHED_BY = Launcher.__name__, "_launcher"
"""Starts a script once for each further device; and where a strategy keeps it."""
NAMES: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""What the Trainer calls the engine's precisions."""
PRECISIONS = {name: one for one, name in NAMES.items()} | {"bf16-true": "bf16", "16-true": "fp16"}
PLUGINS = ("Precision", "MixedPrecision", "HalfPrecision", "EbbtidePrecision")
"""By which the Trainer says so."""
_AVERAGES = "copies weights that may be away: leave it out, and take engine.ema(decay)"
REFUSED = {
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "BaseFinetuning": "changes what is trained within fit, when the engine has the module: freeze and thaw before",
}
"""Callbacks that do not go with an engine, by the names of their classes."""
