"""Train transformer models larger than GPU memory, with the same numbers as if everything had fitted."""

from typing import TYPE_CHECKING, Any

from ebbtide.config import Config

if TYPE_CHECKING:
    from ebbtide.engine import Engine, StepResult, explain, initialize, tune_memory
    from ebbtide.forecasting.forecast import forecast
    from ebbtide.forecasting.forecaster import Forecast
    from ebbtide.layout import Bank
    from ebbtide.runtime.distributed.experts.adapters import ExpertAdapter, register_experts
    from ebbtide.tracing.standalone import Trace, trace
    from ebbtide.tracing.symbolic.escapes import imagining

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
    "explain",
    "forecast",
    "imagining",
    "initialize",
    "register_experts",
    "trace",
    "tune_memory",
]


def __getattr__(name: str) -> Any:
    """Loads torch when it is first needed: the command must set OpenMP up before, and help needs none."""
    if name in ("Engine", "StepResult", "explain", "initialize", "tune_memory"):
        from ebbtide import engine

        return getattr(engine, name)
    if name == "Forecast":
        from ebbtide.forecasting.forecaster import Forecast

        return Forecast
    if name == "forecast":
        from ebbtide.forecasting.forecast import forecast

        return forecast
    if name == "Bank":
        from ebbtide.layout import Bank

        return Bank
    if name in ("ExpertAdapter", "register_experts"):
        from ebbtide.runtime.distributed.experts import adapters

        return getattr(adapters, name)
    if name in ("Trace", "trace"):
        from ebbtide.tracing import standalone

        return getattr(standalone, name)
    if name == "imagining":
        from ebbtide.tracing.symbolic.escapes import imagining

        return imagining
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
