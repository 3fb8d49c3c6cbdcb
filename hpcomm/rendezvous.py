"""How ranks find each other in a store, before they have any other way to talk; all waits end with Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from hpcomm import at_exit
from hpcomm.errors import HpcommError, SchemaMismatch, TimedOut, TransportError

__all__: list[str] = []

T = TypeVar("T")
# Called again and again in a wait, which ends with what it raises.
Look = Callable[[], None]

# Seconds between two looks.
_LONGEST_PAUSE = 0.05


_left: list[threading.Thread] = []  # by interruptible()


@at_exit.register
def _end_beside_threads() -> None:
    """A thread that comes back from torch while Python is being taken apart ends the process by SIGABRT, behind the
    error that the program ended with. Registered early, so that it runs late.
    """
    error = getattr(sys, "last_value", None)  # none that nobody caught: the program's own exit code is not known here
    if error is None or not any(thread.is_alive() for thread in _left):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def nothing() -> None:
    """A Look that has nothing to see."""


def own_store(store: Store, rank: int, size: int, *, timeout: float, look: Look = nothing) -> tuple[PrefixStore, str]:
    """A part of ``store`` that only this start of these ranks has, and its name, the same on all (collective).

    A store may outlive those who met there: torchrun keeps one for all its restarts, whose ranks died at different
    points. So nobody believes what lies there, unless it names something new: each rank writes a random word, rank 0
    answers with a roster of these and a name, and renews both when a word changes. Whoever finds its own word in the
    roster says that it has seen this name. When all have, it is the one.

    A word ends with the number of ranks, and what rank 0 answers with its own: neither is believed where it lies, but
    whoever is answered has it first-hand. Of two processes that come as one rank, as where two jobs meet in one store,
    the first finds its word replaced.

    Raises:
        SchemaMismatch: ranks have another number of them, or another process came as this rank.
        TimedOut: a rank did not come within ``timeout`` seconds.
    """
    place = PrefixStore("hpcomm/start", store)
    words = [f"word/{r}" for r in range(size)]
    seen = [f"seen/{r}" for r in range(size)]
    mine = f"{secrets.token_hex(8)}/{size}"
    name, roster, names = "", [""] * size, set[str]()
    with store_errors("the other ranks" if rank == 0 else "rank 0", look):
        place.set(words[rank], mine)
        for _ in _looks(timeout, look):
            if rank == 0:
                found = [_now(place, word) for word in words]
                strange = [r for r, word in enumerate(found) if word and word.partition("/")[2] != str(size)]
                for r in strange:
                    answered, _, number = _now(place, seen[r]).partition("/")
                    if answered in names and number != str(size):
                        place.set("agreed", f"{name}/{r}/{number}")
                        raise _of_another_number(rank, size, r, number)
                if found != roster and (all(found) or strange):
                    name, roster = secrets.token_hex(8), found
                    names.add(name)
                    place.set("roster", "\n".join([f"{name}/{size}", *roster]))
                    place.set(seen[0], f"{name}/{size}")
                if name and all(_now(place, one) == f"{name}/{size}" for one in seen):
                    place.set("agreed", name)
                    return PrefixStore(f"hpcomm/{name}", store), name
            else:
                given, *theirs = _now(place, "roster").split("\n")
                if given.partition("/")[0] != name and theirs[rank : rank + 1] == [mine]:
                    name, _, number = given.partition("/")
                    place.set(seen[rank], f"{name}/{size}")
                    if number != str(size):
                        raise _of_another_number(rank, size, 0, number)
                agreed, *other = _now(place, "agreed").split("/")
                if name and agreed == name:
                    if other:
                        raise _of_another_number(rank, size, int(other[0]), other[1])
                    return PrefixStore(f"hpcomm/{name}", store), name
            if _now(place, words[rank]) != mine:
                raise SchemaMismatch(
                    f"another process came as rank {rank} of {size} while ranks were meeting; {_ONE_JOB}",
                    rank=rank,
                    operation="init",
                )
        absent = [r for r in range(size) if not _now(place, words[r])]
        # A name came first-hand: rank 0 is there, and who has not answered it yet is not.
        late = [r for r in range(size) if (rank == 0 or name) and _now(place, seen[r]) != f"{name}/{size}"]
    missing = absent or late or [0]
    raise _did_not_come(", ".join(f"rank {r}" for r in missing), timeout)


_ONE_JOB = "do two jobs meet at one MASTER_ADDR and MASTER_PORT?"


def _of_another_number(rank: int, size: int, peer: int, number: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"ranks disagree on how many they are: rank {rank} has {size}, rank {peer} {number} (WORLD_SIZE); {_ONE_JOB}",
        rank=rank,
        peer=peer,
        operation="init",
    )


def _now(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _looks(timeout: float, look: Look) -> Iterator[None]:
    """Turns of a loop that looks into a store, until the time is over; each begins with ``look()``."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    yield
    while time.monotonic() < deadline:
        look()
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
        yield


def _did_not_come(who: str, timeout: float) -> TimedOut:
    return TimedOut(
        f"{who} did not come within {timeout:g} s while ranks were meeting; is it running?", operation="init"
    )


def ask_once_more(look: Look) -> None:
    """Something failed below: ``look()`` may know a moment later which rank that was."""
    for _ in range(0 if look is nothing else 15):
        look()
        time.sleep(0.02)


@contextlib.contextmanager
def store_errors(who: str, look: Look = nothing) -> Iterator[None]:
    """Torch's error of a store inside is a :class:`TransportError`, unless ``look()`` has a better one."""
    try:
        yield
    except HpcommError:
        raise
    except RuntimeError as error:
        ask_once_more(look)
        raise TransportError(
            f"waiting for {who} while ranks were meeting: the store through which ranks find each other has gone "
            f"({error}); look at the output of the process that had it, rank 0 or torchrun",
            operation="init",
        ) from error


def awaited(store: Store, key: str, who: str, timeout: float, look: Look = nothing) -> bytes:
    """What ``who`` puts there; torch's own wait sees Ctrl-C only at its end.

    Raises:
        TimedOut: it was not there within ``timeout`` seconds.
    """
    with store_errors(who, look):
        for _ in _looks(timeout, look):
            if store.check([key]):
                return bytes(store.get(key))
    raise _did_not_come(who, timeout)


def interruptible(make: Callable[[], T], look: Look = nothing) -> T:
    """``make()``, which waits for other ranks and sees no signal, in a thread of its own; ``look()`` meanwhile.

    Ctrl-C, or what ``look()`` raises, leaves it there: it ends with its own time-out, or with the process.
    """
    made: list[T] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def body() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=body, name="hpcomm:start", daemon=True)
    thread.start()
    try:
        while not over.wait(_LONGEST_PAUSE):
            look()
    except BaseException:
        _left.append(thread)
        raise
    if failed:
        ask_once_more(look)
        raise failed[0]
    return made[0]
