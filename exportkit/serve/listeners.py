"""Opens the ports, and says who reaches them."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
from contextlib import ExitStack

from exportkit.errors import HostError

_BACKLOG = 2048
_OTHER_FILES = 1024  # packages, libraries, worker processes


def open_port(host: str, port: int, option: str) -> list[socket.socket]:
    """Listens on a TCP port of every address that `host` has.

    Args:
        host: An address or a name.
        port: The port. 0: the system chooses one.
        option: The option that gave the port, for messages.

    Returns:
        The sockets, all with the same port. Connections wait until somebody accepts them.

    Raises:
        HostError: The host is unknown, or the port is in use or not allowed.
    """
    with ExitStack() as opened:
        found: list[socket.socket] = []
        addresses = _addresses(host)
        for family, address in addresses:
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # Without it, old connections of an earlier server keep the port for a minute.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Its connections inherit it: those of clients that vanished without a word end after two hours.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if family == socket.AF_INET6 and len(addresses) > 1:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # the other socket has IPv4
            try:
                listener.bind((address, port or (found[0].getsockname()[1] if found else 0)))
                listener.listen(_BACKLOG)
            except OSError as error:
                raise _refusal(error, address, port, option) from error
            found.append(listener)
        opened.pop_all()
        return found


def reserve_port(host: str, port: int, option: str) -> socket.socket:
    """Binds a TCP port for somebody who will bind it again, because he cannot take a socket.

    Nobody connects to it meanwhile. The arguments and errors are those of `open_port`.
    """
    family, address = _addresses(host)[0]
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((address, port))
    except OSError as error:
        reserved.close()
        raise _refusal(error, address, port, option) from error
    return reserved


def allow_files(connections: int) -> None:
    """Raises this process's limit of open files, as far as it may, so that so many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host's addresses.

    Raises:
        HostError: The host is unknown.
    """
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for _, address in _addresses(host))


def url_host(host: str) -> str:
    """Returns the host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostError(
            f"--host {host}: this machine knows no such address or name ({error.strerror})",
            hint="Give an address of this machine; 0.0.0.0 means all.",
        ) from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _refusal(error: OSError, address: str, port: int, option: str) -> HostError:
    where = f"port {port} of {address}"
    if error.errno == errno.EADDRINUSE:
        return HostError(
            f"{where} is in use by another process",
            hint=f"End that process (`ss -ltnp 'sport = :{port}'` names it), or give another port with {option}.",
        )
    if error.errno == errno.EACCES:
        return HostError(f"{where} is reserved for root", hint=f"Give {option} a port above 1023.")
    if error.errno == errno.EADDRNOTAVAIL:
        return HostError(
            f"{address} is not an address of this machine", hint="Give --host one that is; 0.0.0.0 means all."
        )
    return HostError(f"{where} cannot be used: {error.strerror}")
