"""Train transformer models larger than GPU memory, with the same numbers as if everything had fitted."""

from ebbtide.config import Config
from ebbtide.engine import Engine, StepResult, initialize

__version__ = "0.1.0"
__all__ = ["Config", "Engine", "StepResult", "__version__", "initialize"]
