"""Models to train by name or from files, and batches for what each of them learns."""

from ebbtide.models.batches import Batches
from ebbtide.models.presets import PRESETS
from ebbtide.models.spec import ModelSpec, build_model, find_model, spec_of

__all__ = ["PRESETS", "Batches", "ModelSpec", "build_model", "find_model", "spec_of"]
