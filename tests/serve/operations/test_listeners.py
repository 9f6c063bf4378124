from __future__ import annotations

import resource
import socket

import pytest

from exportkit.errors import HostError
from exportkit.serve.listeners import allow_files, open_port, reserve_port, url_host


def test_every_address_of_a_name_gets_the_same_port():
    sockets = open_port("localhost", 0, "--port")
    addresses = {entry[4][0] for entry in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)}
    assert {each.getsockname()[0] for each in sockets} == addresses
    (port,) = {each.getsockname()[1] for each in sockets}
    for address in addresses:
        socket.create_connection((address, port)).close()
    for each in sockets:
        each.close()


def test_a_port_that_is_in_use_is_refused_and_one_that_was_is_not():
    (first,) = open_port("127.0.0.1", 0, "--port")
    port = first.getsockname()[1]
    for refuse in (open_port, reserve_port):
        with pytest.raises(HostError, match=f"port {port} of 127.0.0.1 is in use") as refusal:
            refuse("127.0.0.1", port, "--some-port")
        assert "--some-port" in str(refusal.value)
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = first.accept()
    accepted.close()  # the server's side ends first, and stays in TIME_WAIT
    first.close()
    client.close()
    (again,) = open_port("127.0.0.1", port, "--port")
    again.close()


def test_an_address_of_another_machine_says_so():
    with pytest.raises(HostError, match=r"192\.0\.2\.1 is not an address of this machine"):
        open_port("192.0.2.1", 0, "--port")


def test_as_many_files_may_be_open_as_connections_need():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_files(500)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(1524, hard), hard)
        allow_files(10**7)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        allow_files(1)  # does not lower it
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_urls_have_brackets_around_ipv6():
    assert (url_host("::1"), url_host("127.0.0.1")) == ("[::1]", "127.0.0.1")
