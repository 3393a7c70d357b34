"""Every mark and private name of Hugging Face's Trainer that the adapter relies on, in one place.

`tests/integrations/test_integrations_contract.py` looks each of them up, and says which one moved.
"""

from __future__ import annotations

from ebbtide.integrations._models import PREPARED as PREPARED

OLDEST, NEWEST = (5, 0), (5, 24)
"""Versions of transformers that are known to work."""

OVERRIDDEN = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "evaluation_loop",
    "save_model",
    "_build_accelerator_args",
    "_move_model_to_device",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_save",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_best_model",
)
"""Methods of Trainer that the adapter replaces."""
SCHEDULER, OPTIMIZER = "scheduler.pt", "optimizer.pt"
ADAMW = ("adamw_torch", "adamw_torch_fused")
"""Names of `optim` that stand for a rule of the engine's."""
GPUS = "_n_gpu"
"""Of TrainingArguments: how many GPUs one process would split its batches over."""
DEVICE_MAP, SHARDED = "hf_device_map", "is_distributed_loading_by_transformers"
QUANTIZED = ("quantization_method", "is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")
"""Marks of a model that something else has placed."""
CHECKPOINTED, OFFLOADING = "_gradient_checkpointing_func", "checkpoint_func"
"""Of a module that checkpoints: what it calls; and that function's name where it offloads."""
