"""Connections that break without a word: who made them is told."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch.distributed as dist

from ebbtide.runtime.distributed.keep_alive import OPEN, watched
from ebbtide.runtime.distributed.ranks import Ranks
from group import group_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells which they are")


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listening.getsockname())
    other, _ = listening.accept()
    return listening, one, other


def patience(one: socket.socket) -> float:
    """Seconds; 0: for ever."""
    asks = one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000 if asks else 0


def test_connections_of_others_stay_as_they_are() -> None:
    before = connected()
    pair = socket.socketpair()
    with watched(50):
        within = connected()
        unix = socket.socketpair()
    try:
        assert all(patience(one) == 0 for one in before)
        assert all(patience(one) == 50 for one in within[1:])
        idle = within[1].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        each = within[1].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert idle + 3 * each == 50
    finally:
        for one in (*before, *within, *pair, *unix):
            one.close()


def open_to_others() -> list[float]:
    """How long this rank's connections wait for who is out of reach."""
    ranks = Ranks(None)
    assert ranks.size == dist.get_world_size()
    found = []
    for entry in OPEN.iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found.append(patience(one))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hear_of_who_is_out_of_reach(size: int) -> None:
    """They wait for words longer than for memory, and not for a machine that is gone."""
    for found in group_of(size).run(open_to_others):
        assert sum(1800 >= seconds > 0 for seconds in found) >= size - 1
