"""How long does a boundary's message take? hpcomm.Channel against what PyTorch and MPICH offer, tensors verified.

    python -m benchmarks.p2p                                  # every case, two ranks of this host
    python -m benchmarks.p2p --cases "32 x 16 KB,1 x 25 MB" --rounds 15 --json result.json
    python -m benchmarks.p2p --transport gloo                 # hpcomm over gloo, as between hosts
    python -m benchmarks.p2p --tune                           # from which size does a tensor travel unpacked?
    python -m benchmarks.p2p --headers                        # what do header and schema cost?

Two ranks bounce a message: rank 0 sends, rank 1 receives it and sends one of its own, alike, back. A time is that of
the round trip on rank 0, divided by 2: one message from the call of send to the tensors in the receiver's hands. The
same processes run all peers in turn, round by round; medians and quartiles over the rounds are printed.

Peers, all in the same processes: `channel` is hpcomm.Channel on a dict of tensors; `channel-frozen` the same with
schema="frozen"; `send` is dist.send and dist.recv for each tensor; `batch` is dist.batch_isend_irecv; `cat` is
torch.cat of the bytes, one dist.send, and views of what came (these three over gloo, into tensors that are there
already, without a word about shapes); `mpich` is MPICH's Send and Recv of as many bytes as are packed already (mpi4py,
the extra "bench"): no packing, no structure, no tensors made.

With --headers, three channels take turns: a frozen one, whose messages have no header where they are as short as the
first cases; one whose schema stays the same; and one whose schema is always another. The differences, round by round,
are what a header costs in all, on both sides together and with the way that its bytes take, and what a new schema costs
beyond that.

Before the first and after the last round every peer's messages are compared with what was sent, on new values each
time. The exit code is 1 if a byte was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.collectives import positive
from benchmarks.launch import JobFailed, find_mpiexec, result_file, run_ranks
from benchmarks.p2p_rank import CASES, PEERS
from benchmarks.peers import NO_MPI


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="all", help=f"with commas, of {', '.join(CASES)}; or all")
    parser.add_argument("--vs", default=",".join(PEERS), help=f"peers, of {','.join(PEERS)}")
    parser.add_argument("--rounds", type=positive, default=9, help="blocks of each peer per case (9)")
    parser.add_argument("-n", "--iterations", type=positive, help="of a block; as many as take 30 ms by default")
    parser.add_argument("--transport", choices=("auto", "shm", "gloo"), default="auto", help="of hpcomm (auto)")
    parser.add_argument("--tune", action="store_true", help="measure from which size tensors travel unpacked, instead")
    parser.add_argument("--headers", action="store_true", help="measure what headers and schemas cost, instead")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for everything (1800)")
    parser.add_argument("--json", type=result_file, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args(argv)
    arguments.cases = list(CASES) if arguments.cases == "all" else [name.strip() for name in arguments.cases.split(",")]
    arguments.peers = list(dict.fromkeys(["channel", *filter(None, arguments.vs.split(","))]))
    for flag, given, known in (("--cases", arguments.cases, CASES), ("--vs", arguments.peers, PEERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{flag}: {unknown[0]!r} is none of {', '.join(known)}")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """The job, and the JSON; returns the exit code."""
    notes = []
    mpiexec = None
    if "mpich" in arguments.peers and not (arguments.tune or arguments.headers):
        mpiexec = find_mpiexec()
        if mpiexec is None:
            arguments.peers.remove("mpich")
            notes.append(f"mpich is left out: {NO_MPI}")
            print(f"# {notes[-1]}")
    os.environ["HPCOMM_CPU_TRANSPORT"] = arguments.transport
    with tempfile.TemporaryDirectory(prefix="hpcomm-bench-") as folder:
        result = Path(folder) / "result.json"
        call = ["-m", "benchmarks.p2p_rank", json.dumps(vars(arguments)), str(result)]
        run_ranks(2, call, mpiexec=mpiexec, deadline=time.time() + arguments.timeout)
        document: dict[str, Any] = {"question": "p2p", **json.loads(result.read_text()), "notes": notes}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if document["wrong"] else 0


def main() -> None:
    try:
        sys.exit(run(parse()))
    except JobFailed as error:
        sys.exit(f"benchmarks.p2p: {error}")


if __name__ == "__main__":
    main()
