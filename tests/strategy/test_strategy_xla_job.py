"""A job of XLA: where its processes meet, as rank 0 tells the others, and what jax
knows of them."""

import types

import jax
import numpy as np
import pytest

from zstrat.strategy.mirrored import _xla_job


class Line:
    """What a rank hears of a broadcast; ranks call one after the other."""

    size = 2

    def __init__(self, rank, said):
        self.rank, self._said = rank, said

    def all_reduce(self, tree, op):
        assert op == "max"
        return self.broadcast(tree, 0)

    def broadcast(self, tree, root):
        if self.rank == root:
            self._said.append([np.array(x) for x in tree])
        return self._said[-1]


@pytest.fixture
def ranks():
    said = []
    return Line(0, said), Line(1, said)


def test_all_hear_a_free_port_of_rank_0(ranks):
    first, second = [_xla_job._broadcast_address(rank, "127.0.0.1") for rank in ranks]
    assert first == second
    host, _, port = first.rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 2**16


def test_an_address_of_version_6_is_told_in_brackets(ranks, monkeypatch):
    monkeypatch.setattr(_xla_job, "free_ports", lambda count, host: [1234])
    assert [_xla_job._broadcast_address(rank, "::1") for rank in ranks] == [
        "[::1]:1234"
    ] * 2


def test_rank_0_tells_why_it_has_no_address(ranks):
    """The others do not wait for it: each says what is wrong."""
    for rank in ranks:
        with pytest.raises(ValueError, match=r"\b8\.8\.8\.8\b.*RING"):
            _xla_job._broadcast_address(rank, "8.8.8.8")


def test_an_address_of_another_machine_is_told_too(ranks, monkeypatch):
    def taken(count, host):
        raise OSError(99, f"cannot assign {host}: " + "\u00e9" * 2000)

    monkeypatch.setattr(_xla_job, "free_ports", taken)
    with pytest.raises(OSError, match="cannot assign"):
        _xla_job._broadcast_address(ranks[0], "10.0.0.1")
    with pytest.raises(ValueError, match=r"rank 0.*\b10\.0\.0\.1\b"):
        _xla_job._broadcast_address(ranks[1], "10.0.0.1")


def test_a_job_of_jax_is_the_strategys_own():
    """This process is alone in jax's eyes."""
    with pytest.raises(RuntimeError, match=r"\b0\b.*\b1\b.*rank 1"):
        _xla_job._mesh(Line(1, []))


def test_all_processes_of_a_job_have_as_many_devices(monkeypatch):
    devices = [
        types.SimpleNamespace(id=number, process_index=process)
        for number, process in enumerate([0, 0, 1])
    ]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(RuntimeError, match=r"\[2, 1\]"):
        _xla_job._mesh(Line(0, []))
