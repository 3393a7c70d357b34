"""Models to train by name or from files, and batches for what each of them learns."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebbtide.models.lookup import look_up
from ebbtide.models.presets import PRESETS

if TYPE_CHECKING:
    from ebbtide.models.batches import Batches
    from ebbtide.models.spec import ModelSpec, build_model, find_model, spec_of

__all__ = ["PRESETS", "Batches", "ModelSpec", "build_model", "find_model", "look_up", "spec_of"]


_PLACES = {
    "Batches": "batches",
    "ModelSpec": "spec",
    "build_model": "spec",
    "find_model": "spec",
    "spec_of": "spec",
}


def __getattr__(name: str) -> Any:
    """Names are looked up without torch; it is imported with what builds a model."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
