"""Every mark and private name of Accelerate that the adapter relies on, in one place.

`tests/integrations/test_integrations_contract.py` looks each of them up, and says which one moved.
"""

from __future__ import annotations

from ebbtide.integrations._models import PREPARED as PREPARED

OLDEST, NEWEST = (1, 12), (1, 15)
"""Versions of accelerate that are known to work."""

OVERRIDDEN = (
    "mixed_precision",
    "prepare",
    "prepare_model",
    "backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_state_dict",
    "save_state",
    "load_state",
    "free_memory",
)
"""Methods of Accelerator that the adapter replaces."""
SEEN = ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
"""What was prepared, and hooks of the user's; `save_state` and `load_state` go through them."""
CHECKPOINTS = "checkpoints"
"""Below `project_dir`: where states with automatic names are saved, each as a name, an underscore and a number."""
PRECISION = "ACCELERATE_MIXED_PRECISION"
"""In the environment, by `accelerate launch`."""
LAUNCHED = (
    ("ACCELERATE_USE_DEEPSPEED", "false", "ebbtide takes DeepSpeed's place: leave --use_deepspeed out"),
    ("ACCELERATE_USE_FSDP", "false", "ebbtide shards the model itself: leave --use_fsdp out"),
    ("ACCELERATE_USE_MEGATRON_LM", "false", "ebbtide shards the model itself: leave --use_megatron_lm out"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "false", "ebbtide shards the model itself: leave it out"),
    (
        "ACCELERATE_DYNAMO_BACKEND",
        "no",
        "a model that is compiled as a whole hides its parts from the engine: leave --dynamo_backend out",
    ),
)
"""What `accelerate launch` says in the environment, what stands there where it is off, and what to do."""
