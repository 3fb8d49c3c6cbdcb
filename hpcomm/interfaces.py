"""Network interfaces: which one an address is on, and which one torch's gloo takes by itself."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

__all__: list[str] = []

VARIABLE = "GLOO_SOCKET_IFNAME"  # torch's
_SIOCGIFADDR = 0x8915
_led: set[str] = set()  # what lead_gloo_to() has set the variable to


def is_loopback(address: str) -> bool:
    """Of a numeric address, with or without a scope."""
    return ipaddress.ip_address(address.split("%", maxsplit=1)[0]).is_loopback


def own_address() -> str:
    """What the name of this host means on it: the first address that it has itself, as gloo looks for it. Empty where
    there is none; then gloo takes the loopback.
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return str(address[0])
    return ""


def names() -> list[str]:
    """Of all interfaces of this host."""
    return [name for _, name in socket.if_nameindex()]


def interface_of(address: str) -> str:
    """The interface that has ``address``, a numeric one; empty where none is found."""
    wanted = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    if wanted.version == 4:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return next((name for name in names() if _address_v4(probe, name) == str(wanted)), "")
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    digits = wanted.packed.hex()
    return next((fields[5] for fields in map(str.split, lines) if fields[0] == digits), "")


def _address_v4(probe: socket.socket, name: str) -> str:
    request = array.array("B", struct.pack("40s", name.encode()))
    try:
        fcntl.ioctl(probe, _SIOCGIFADDR, request)
    except OSError:
        return ""  # it has none
    return socket.inet_ntoa(request.tobytes()[20:24])


def lead_gloo_to(address: str) -> None:
    """Where the name of this host is that of its loopback, as Debian has it, torch's groups of gloo would listen there,
    and no other host could reach them. They take the interface of ``address`` then, all of this process.
    """
    if VARIABLE in os.environ or is_loopback(address):
        return
    own = own_address()
    if own and not is_loopback(own):
        return
    if name := interface_of(address):
        os.environ[VARIABLE] = name
        _led.add(name)


def chosen() -> str:
    """What the user has set the variable to, the first of several; empty where nothing."""
    value = os.environ.get(VARIABLE, "")
    return "" if value in _led else value.split(",")[0]


def told_of_gloo() -> str:
    """What decides where gloo listens, for errors: "; GLOO_SOCKET_IFNAME=eth0" or what the host's name means."""
    if VARIABLE in os.environ:
        return f"; {VARIABLE}={os.environ[VARIABLE]!r} (this host has {', '.join(names())})"
    own = own_address()
    return f"; {VARIABLE} is not set, and {socket.gethostname()!r} means {own or 'no address of this host'} here"
