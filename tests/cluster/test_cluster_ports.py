"""Ports for tasks that bind them later: nobody else is given them meanwhile. An error
says whose fault it is that there is none."""

import errno
import os
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


@pytest.fixture
def refusing(monkeypatch):
    """Makes every bind to a chosen port end in an error; the ports that were tried."""

    def refuse(error):
        tried = []

        class Probe(socket.socket):
            def bind(self, address):
                tried.append(address[1])
                if address[1] or error.errno in (errno.EADDRNOTAVAIL, -2):
                    raise error
                super().bind(address)

        monkeypatch.setattr(socket, "socket", Probe)
        return tried

    return refuse


def told(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "error", [socket.gaierror(-2, "unknown name"), told(errno.EADDRNOTAVAIL)]
)
def test_a_host_that_is_not_this_one_is_looked_up_once(error, refusing):
    tried = refusing(error)
    words = rf"'elsewhere': {error.strerror}; expected a name .* of this machine"
    with pytest.raises(OSError, match=words) as caught:
        free_ports(3, "elsewhere")
    assert caught.value.errno == error.errno
    assert len(tried) == 1


def test_what_another_port_would_not_mend_is_not_tried_again(refusing):
    tried = refusing(told(errno.ENOBUFS))
    with pytest.raises(OSError, match=r"'127\.0\.0\.1'") as caught:
        free_ports(1)
    assert caught.value.errno == errno.ENOBUFS
    assert len(tried) == 1


@pytest.mark.parametrize("number", [errno.EADDRINUSE, errno.EACCES])
def test_where_none_below_its_range_is_left_the_kernel_chooses(number, refusing):
    tried = refusing(told(number))
    assert len(set(free_ports(2))) == 2
    assert tried[-2:] == [0, 0]
    assert 0 not in tried[:-2]


@pytest.mark.parametrize("first", [1024, 10_239, 10_240])
def test_where_it_leaves_none_below_its_range_the_kernel_chooses(
    first, kernel_chooses, refusing
):
    kernel_chooses(f"{first}\t65000\n")
    tried = refusing(told(errno.EADDRINUSE))
    assert len(set(free_ports(3))) == 3
    assert set(tried) == {0}


def test_where_the_kernel_has_none_either_the_error_says_so(monkeypatch):
    class Probe(socket.socket):
        def bind(self, address):
            raise told(errno.EADDRINUSE)

    monkeypatch.setattr(socket, "socket", Probe)
    with pytest.raises(OSError, match="TCP"):
        free_ports(1)
