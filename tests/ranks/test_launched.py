"""A process that a launcher's environment tells of others."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch

import ebbtide
from ebbtide.errors import ConfigError, RanksError
from ebbtide.runtime.distributed.launch import SAYS, join, launched


def test_others_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RanksError, match="the 2 processes that WORLD_SIZE tells of do not find each other"):
        join("cpu", timedelta(seconds=1))


def test_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE.*'two'"):
        launched()


def test_a_process_that_is_not_told_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SAYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ConfigError, match="2 processes train together, and MASTER_ADDR, MASTER_PORT are not in"
    ):
        ebbtide.initialize(torch.nn.Linear(2, 2))
    monkeypatch.delenv("WORLD_SIZE")
    ebbtide.initialize(torch.nn.Linear(2, 2)).close()
