"""Values by name: weights and gradients as a user wants to see and to set them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch

from ebbtide.checkpoint import values
from ebbtide.engine.core import EngineCore
from ebbtide.errors import ConfigError, UnsupportedError, nearest, warn_user
from ebbtide.memory.budget import SNAPSHOT
from ebbtide.memory.disk.vectors import view


class ValuesByName:
    def __init__(self, core: EngineCore) -> None:
        self._core, self._session = core, core.session

    @contextmanager
    def weights(self, patterns: tuple[str, ...], write: bool) -> Iterator[dict[str, torch.Tensor]]:
        session = self._core.open()
        session.reclaim()
        if write:
            session.catch_up_averages()
        found = {n: values.whole(session, n, values.load(session, n)) for n in self._match(patterns)}
        yield found
        if write:
            self._core.open()
            known = values.names(session)
            for name in found:
                if name not in known:
                    raise ConfigError(
                        f"weights: {name!r} is no parameter{nearest(name, known)}; nothing was written"
                    )
            for name, value in found.items():
                values.require(session, name, value)
            for name, value in found.items():
                values.save(session, name, value)

    @contextmanager
    def gradients(self, patterns: tuple[str, ...]) -> Iterator[dict[str, torch.Tensor]]:
        if self._core.config.updates == "in-backward":
            raise UnsupportedError(
                'gradients are consumed in backward; use updates = "exact" to look at them'
            )
        session = self._core.open()
        scale = 1.0 if self._core.scaler is None else self._core.scaler.scale
        found = {name: values.gradient(session, name, scale) for name in self._match(patterns)}
        yield {n: values.whole(session, n, value) for n, value in found.items() if value is not None}

    @contextmanager
    def resident(self, write: bool) -> Iterator[None]:
        session = self._core.open()
        session.reclaim()
        if session.lock_free is not None:
            session.lock_free.begin_evaluation()
        session.queue.flush()  # one by one they have room, not beside all parameters
        session.hold_outputs()
        if write:
            session.catch_up_averages()
        if session.sharing is None:
            session.homes.make_way(session.places.short_of_all())
        with session.places.resident(), session.data.in_pass(), self._remembered(write) as kept:
            session.data.notice_all()  # of a context around this one
            session.data.watch_writes(kept)
            try:
                yield
            finally:
                self._notice_live_writes(write)

    @contextmanager
    def _remembered(self, write: bool) -> Iterator[list[int]]:
        """Room for what parameters were, where nothing else tells which elements are written: gives whose."""
        session = self._session
        kept = session.data.split_members if write else []
        nbytes = sum(session.data.memory[member].nbytes for member in kept)
        tier = session.store.near
        session.room.make(tier, nbytes)
        session.ledger.reserve(tier, SNAPSHOT, nbytes)
        try:
            yield kept
        finally:
            session.ledger.release(tier, SNAPSHOT, nbytes)

    def _notice_live_writes(self, asked: bool) -> None:
        data, names = self._session.data, []
        try:
            if not self._core.closed:
                names = [data.names[member] for member in data.notice_all()]
        finally:
            data.live.end()
        if names and not asked:
            warn_user(
                f"{names[0]}{f' and {len(names) - 1} others' if names[1:] else ''} were written through .data within "
                "engine.resident(). The writes count; engine.resident(write=True) says that they are meant"
            )

    def _match(self, patterns: tuple[str, ...]) -> list[str]:
        names = values.names(self._session)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"{pattern!r} matches no parameter{nearest(pattern, names)}")
        return [n for n in names if not patterns or any(fnmatchcase(n, p) for p in patterns)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        session = self._core.open()
        session.reclaim()
        return values.state_dict(session)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool) -> Any:
        session = self._core.open()
        session.refuse_swapped()
        found = values.compare_keys(session, state, strict)
        session.catch_up_averages()
        self._core.end_pending()
        self._core.clear()
        values.load_state_dict(session, state)
        if not found.missing_keys:
            self._core.mend()
        return found

    def weights_sha256(self) -> str:
        session = self._core.open()
        session.reclaim()
        digest = hashlib.sha256()
        for name in sorted(values.names(session)):
            value = values.load(session, name).contiguous()
            digest.update(view(value.data_ptr(), value.nbytes))
        return digest.hexdigest()
