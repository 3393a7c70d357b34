"""Train transformer models larger than GPU memory, with the same numbers as if everything had fitted."""

from typing import TYPE_CHECKING, Any

from ebbtide.config import Config

if TYPE_CHECKING:
    from ebbtide.engine import Engine, StepResult, initialize, tune_memory
    from ebbtide.forecaster import Forecast
    from ebbtide.forecasts import forecast
    from ebbtide.layout import Bank
    from ebbtide.run.mixtures import ExpertAdapter, register_experts
    from ebbtide.tracing.alone import Trace, trace
    from ebbtide.tracing.imagining_flag import imagining

__version__ = "0.1.0"
__all__ = [
    "Bank",
    "Config",
    "Engine",
    "ExpertAdapter",
    "Forecast",
    "StepResult",
    "Trace",
    "__version__",
    "forecast",
    "imagining",
    "initialize",
    "register_experts",
    "trace",
    "tune_memory",
]


def __getattr__(name: str) -> Any:
    """Loads torch when it is first needed: the command must set OpenMP up before, and help needs none."""
    if name in ("Engine", "StepResult", "initialize", "tune_memory"):
        from ebbtide import engine

        return getattr(engine, name)
    if name == "Forecast":
        from ebbtide.forecaster import Forecast

        return Forecast
    if name == "forecast":
        from ebbtide.forecasts import forecast

        return forecast
    if name == "Bank":
        from ebbtide.layout import Bank

        return Bank
    if name in ("ExpertAdapter", "register_experts"):
        from ebbtide.run import mixtures

        return getattr(mixtures, name)
    if name in ("Trace", "trace"):
        from ebbtide.tracing import alone

        return getattr(alone, name)
    if name == "imagining":
        from ebbtide.tracing.imagining_flag import imagining

        return imagining
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
