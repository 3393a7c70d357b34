"""What a user holds: forward, backward, step, the module's values by name, and checkpoints."""

from ebbtide.engine.process import tune_memory
from ebbtide.engine.stepping import StepResult
from ebbtide.engine.training import Engine, explain, initialize
from ebbtide.runtime.process_tiers import Tiers, open_tiers

__all__ = ["Engine", "StepResult", "Tiers", "explain", "initialize", "open_tiers", "tune_memory"]
