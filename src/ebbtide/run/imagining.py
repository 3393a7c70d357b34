"""Symbolic traces of a session's passes, so that even the first iteration has a plan."""

from __future__ import annotations

import warnings

from torch import nn

from ebbtide.intercept import Interceptor
from ebbtide.record import Record
from ebbtide.run.model import ModelData
from ebbtide.run.recording import imagine
from ebbtide.run.unmanaged import Unmanaged
from ebbtide.runtime.planning.call import Call
from ebbtide.tracing.escaped import Escapes


class Imagining:
    def __init__(
        self, module: nn.Module, data: ModelData, interceptor: Interceptor, unmanaged: Unmanaged, saved: bool
    ) -> None:
        """`saved`: activations may leave the device, so it is to be known which are saved."""
        self._module, self._data, self._interceptor = module, data, interceptor
        self._unmanaged, self._saved = unmanaged, saved
        self.obstacle = ""
        """Why passes of this session cannot be imagined, where that is known."""
        self.note = ""
        """Why there was no trace, the last time."""
        self._told: set[str] = set()

    def imagine(self, call: Call) -> Record | None:
        if self.obstacle:
            self.note = self.obstacle
            return None
        self.note = ""
        ledger, escapes = self._data.store.ledger, Escapes()
        try:
            return imagine(
                self._module,
                self._data,
                self._interceptor,
                self._unmanaged.fixed_bytes(),
                call,
                saved=self._saved,
                free=ledger.level["device"] + ledger.room("device"),
                escapes=escapes,
            )
        except Exception as reason:
            # Any operator may lack a fake kernel; the first iteration is then cautious instead.
            self.note = f"{type(reason).__name__}: {reason}"
            return None
        finally:
            self._tell(escapes)

    def _tell(self, escapes: Escapes) -> None:
        for held in escapes.find():
            if held not in self._told:
                self._told.add(held)
                warnings.warn(
                    f"forward, or a hook, keeps a tensor of a pass that was only imagined, which has no values: {held}. "
                    "Keep it where the engine can put it back (an attribute of the module), or keep it only "
                    "`if not ebbtide.imagining()`",
                    stacklevel=2,
                )
