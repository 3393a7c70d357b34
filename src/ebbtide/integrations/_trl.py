"""Every private name of TRL that the adapter relies on, in one place.

`tests/integrations/test_integrations_contract.py` looks each of them up, and says which one moved.
"""

from __future__ import annotations

OLDEST = NEWEST = (1, 16)
"""Versions of trl that are known to work."""

OVERRIDDEN = {"DPOTrainer": ("_precompute_ref_logps",), "GRPOTrainer": ("_generate_single_turn",)}
"""Methods that the adapter replaces."""
ARGUMENTS = {
    "SFTConfig": ("activation_offloading",),
    "DPOConfig": ("activation_offloading", "sync_ref_model"),
    "GRPOConfig": ("sync_ref_model", "use_vllm"),
}
"""What is refused, or looked at, by name."""
