"""``hpcomm doctor``: tries what a job needs, on this machine or between the ranks of a torchrun job, and says what is
in its way.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from typing import Any

from hpcomm._version import __version__
from hpcomm.doctor import alone, together
from hpcomm.doctor.finding import FAIL, OK, Finding, show
from hpcomm.errors import HpcommError, InvalidArgument, PeerError
from hpcomm.settings import LONGEST_TIMEOUT, default_timeout

__all__: list[str] = []

TIMEOUT = 60.0  # seconds for the ranks to come, and for each operation
_START = 60.0  # seconds in which processes of this machine import torch, also where they are many
_MOST_RANKS = 1024


def add_to(commands: Any) -> None:
    """Adds ``doctor`` to the subparsers of hpcomm's command line."""
    doctor = commands.add_parser(
        "doctor",
        help="try what a job needs: here, or under torchrun between its ranks",
        description="Tries what a job needs and says what is in its way. By itself it starts ranks on this machine; "
        "under torchrun it is the job (torchrun ... -m hpcomm doctor). Exit status: 1 when something failed.",
    )
    doctor.add_argument("--ranks", type=int, default=2, help="how many to start (2)")
    doctor.add_argument(
        "--timeout", type=float, metavar="S", help=f"seconds to wait for a rank (HPCOMM_TIMEOUT, or {TIMEOUT:g})"
    )
    doctor.set_defaults(run=_run)


def _run(options: Any) -> int:
    if not 1 <= options.ranks <= _MOST_RANKS:
        raise InvalidArgument(f"--ranks {options.ranks}: expected 1 to {_MOST_RANKS}, which start on this machine")
    if options.timeout is not None and not 0 < options.timeout <= LONGEST_TIMEOUT:
        raise InvalidArgument(f"--timeout {options.timeout:g}: expected seconds, above 0, at most {LONGEST_TIMEOUT:,}")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        broken = alone.build()
        if broken.mark == FAIL:  # the ranks would say the same, each of them
            show(_title(), [broken])
            return 1
        return _start(options)
    return _as_rank(options)


def _as_rank(options: Any) -> int:
    """Joins the job that somebody has started; rank 0 prints what all ranks have found."""
    from hpcomm import mesh as meshes

    built = alone.build()
    if built.mark == FAIL:
        return _give_up(built)
    mine: list[Finding] = []
    try:
        timeout = default_timeout(TIMEOUT) if options.timeout is None else options.timeout
        _, size = meshes.rank_and_size()
        mine = [built, alone.cores(), alone.files(size), alone.gpus(), *alone.settings(os.environ)]
        if size > 1:
            mine += [alone.meeting_place(os.environ), alone.gloo_interface(os.environ)]
        unable = [finding for finding in mine if finding.mark == FAIL]
        if unable:
            return _give_up(*unable)
        mesh = meshes.init(timeout=timeout)
    except HpcommError as error:
        notes = [finding for finding in mine if finding.mark != OK]
        said = str(error) if not isinstance(error, PeerError) else str(error).splitlines()[0]  # else its traceback
        return _give_up(*notes, Finding(FAIL, "start", said))
    try:
        with mesh:
            merged, found = together.find(mesh, mine)
            failed = any(finding.mark == FAIL for finding in (*merged, *found))
            if mesh.rank == 0:
                show(_title(), merged)
                show(f"{size} rank{'s' * (size > 1)} together", found)
                print("\nsomething failed, see above" if failed else "\nnothing is in the way", flush=True)
    except HpcommError as error:
        return _give_up(Finding(FAIL, "job", str(error)))
    return 1 if failed else 0


def _give_up(*why: Finding) -> int:
    show(f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}", why)
    return 1


def _start(options: Any) -> int:
    """Starts ranks on this machine, which do the rest; ends with them."""
    from torch._C._distributed_c10d import TCPStore

    timeout = default_timeout(TIMEOUT) if options.timeout is None else options.timeout
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as torchrun's agent has one
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
    }
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **job}
    command = [sys.executable, "-m", "hpcomm", "doctor", "--timeout", str(timeout)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in map(str, range(options.ranks)):
            its = environment | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(subprocess.Popen(command, env=its))
        longest = _START + 3 * timeout
        deadline = time.monotonic() + longest
        ended = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
        return 1 if any(ended) else 0
    except subprocess.TimeoutExpired:
        show(f"{options.ranks} ranks", [Finding(FAIL, "ranks", f"not all have ended after {longest:g} s")])
        return 1
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _title() -> str:
    return f"hpcomm {__version__}, Python {platform.python_version()}, {_torch()}, {platform.system()} {_kernel()}"


def _torch() -> str:
    torch = sys.modules.get("torch")
    return "no torch" if torch is None else f"torch {torch.__version__}"


def _kernel() -> str:
    match = re.match(r"\d+\.\d+", platform.release())
    return match[0] if match else platform.release()
