"""Two hosts for ranks of one machine: namespaces of their own for network, mounts and users, joined by one cable.

A rank calls :func:`enter` before anything else. Ranks of one host share a network namespace and /dev/shm; between hosts
there is only a veth pair: host h has the address 10.77.0.(h+1) on its ``eth0``. It carries as much as the cores can
copy, or each way as many bits a second as it is told to, with a token bucket (tc-tbf(8)); it has no delay of its own.
Nothing of it needs to be root, and all of it ends with the last process. Where the machine does not allow it,
:func:`why_not` says what it refuses.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

INTERFACE = "eth0"
_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000
_PATIENCE = 20.0  # seconds for the other ranks to come
_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_not() -> str:
    """Why this machine cannot have hosts; empty when it can."""
    code = (
        "from benchmarks import hosts; import os; hosts._make(); hosts._cable(os.getpid());"
        "hosts._up(0); hosts._slow_down('1gbit')"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["unknown"])[-1]


def enter(folder: Path, rank: int, host: int, *, first: bool, rate: str | None = None) -> None:
    """Moves this process, which has one thread, to ``host`` (0 or 1), and sets the job's environment.

    Args:
        folder: where the ranks find each other; empty at first.
        first: this rank makes the host; the other ranks of the host join it. Rank 0 is the first of host 0.
        rate: of the cable, each way, as tc takes it ("1gbit"); None: no limit.
    """
    if first and host == 0:
        _make()
        _say(folder, "host0")
        other = int(_heard(folder, "host1"))
        _cable(other)
        _up(host, rate)
        _say(folder, "cable")
    elif first:
        # In the user namespace of host 0, whose root may then join the two networks.
        _join(int(_heard(folder, "host0")), ("user",))
        _call(_libc.unshare, _NEWNET | _NEWNS)
        _own_memory()
        _say(folder, "host1")
        _heard(folder, "cable")
        _up(host, rate)
        _say(folder, "up1")
    else:
        _join(int(_heard(folder, f"host{host}")), ("user", "net", "mnt"))
    _heard(folder, "up1")
    dumpable = 4  # which a process with other credentials is not; ranks of a host read each other's memory
    _call(_libc.prctl, dumpable, 1, 0, 0, 0)
    os.environ.update(MASTER_ADDR=address(0), MASTER_PORT="29500", GLOO_SOCKET_IFNAME=INTERFACE)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # rank 0 has the store


def address(host: int) -> str:
    """On the cable."""
    return f"10.77.0.{host + 1}"


def unplug() -> None:
    """Pulls this host's end of the cable: packets vanish, nobody is told."""
    _ip("link", "set", INTERFACE, "down")


def know(name: str, at: str, file: Path) -> None:
    """On this host, ``name`` is the address ``at``: by an /etc/hosts of its own, written to ``file``."""
    file.write_text(f"127.0.0.1 localhost\n{at} {name}\n")
    bind = 1 << 12
    _call(_libc.mount, str(file).encode(), b"/etc/hosts", None, bind, None)


def listening() -> set[str]:
    """Addresses on which sockets of this host accept connections, "0.0.0.0" and "::" among them."""
    found = set()
    for file, family in (("tcp", 4), ("tcp6", 6)):
        for line in Path("/proc/net", file).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A":
                digits = local.split(":")[0]
                numbers = bytes.fromhex(digits)[::-1]
                found.add(".".join(map(str, numbers)) if family == 4 else digits.strip("0") or "::")
    return found


def _make() -> None:
    user, group = os.getuid(), os.getgid()
    _call(_libc.unshare, _NEWUSER | _NEWNET | _NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _own_memory()


def _own_memory() -> None:
    private, recursive = 1 << 18, 1 << 14
    _call(_libc.mount, b"none", b"/", None, private | recursive, None)
    _call(_libc.mount, b"none", b"/dev/shm", b"tmpfs", 0, None)


def _join(process: int, kinds: tuple[str, ...]) -> None:
    handles = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    for handle in handles:
        _call(_libc.setns, handle, 0)
        os.close(handle)


def _cable(other: int) -> None:
    _ip("link", "add", INTERFACE, "type", "veth", "peer", "name", "peer0")
    _ip("link", "set", "peer0", "netns", str(other), "name", INTERFACE if other != os.getpid() else "peer1")


def _up(host: int, rate: str | None = None) -> None:
    _ip("link", "set", "lo", "up")
    _ip("address", "add", f"{address(host)}/24", "dev", INTERFACE)
    _ip("link", "set", INTERFACE, "up")
    if rate is not None:
        _slow_down(rate)


def _slow_down(rate: str) -> None:
    """What this host sends: at most ``rate``. The bucket holds what goes out between two ticks of a slow clock."""
    bucket = max(128 << 10, bits_of(rate) // 8 // 250)
    _run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", str(bucket), "latency", "50ms")


def bits_of(rate: str) -> int:
    """Per second; ValueError for what is none, such as "fast"."""
    found = re.fullmatch(r"([1-9][0-9]*)([kmg])bit", rate)
    if found is None:
        raise ValueError(f"{rate!r}: expected a rate such as 1gbit or 200mbit")
    return int(found[1]) * 1000 ** ("kmg".index(found[2]) + 1)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _call(function: object, *arguments: object) -> None:
    if function(*arguments) != 0:  # type: ignore[operator]
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")  # type: ignore[attr-defined]


def _say(folder: Path, word: str) -> None:
    partial = folder / f"{word}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / word)


def _heard(folder: Path, word: str) -> str:
    deadline = time.monotonic() + _PATIENCE
    while not (folder / word).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody said {word!r} within {_PATIENCE:.0f} s")
        time.sleep(0.01)
    return (folder / word).read_text()
