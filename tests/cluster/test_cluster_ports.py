"""Ports for tasks that bind them later: nobody else is given them meanwhile."""

import random
import socket

import pytest

from zstrat.cluster import free_ports


def test_ports_differ_are_free_and_are_none_that_the_kernel_chooses():
    found = free_ports(20)
    assert len(set(found)) == 20
    with open("/proc/sys/net/ipv4/ip_local_port_range") as told:
        first, last = map(int, told.read().split())
    for port in found:
        assert port < first or port > last
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_somebody_has_is_not_given(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        (free,) = free_ports(1)
        draws = iter([taken, taken, free, free])
        monkeypatch.setattr(random.SystemRandom, "choice", lambda *_: next(draws))
        assert free_ports(1) == [free]


@pytest.mark.parametrize("told", ["1024\t65000\n", "nonsense", ""])
def test_where_the_kernel_chooses_among_all_it_is_asked(told, kernel_chooses):
    kernel_chooses(told)
    assert len(set(free_ports(3))) == 3


def test_a_host_that_is_not_this_one_has_none():
    with pytest.raises(OSError, match=r"'192\.0\.2\.1'"):
        free_ports(1, "192.0.2.1")


def test_addresses_of_version_6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no address of version 6")
    assert free_ports(1, "::1")
