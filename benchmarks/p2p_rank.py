"""One rank of benchmarks.p2p: bounces messages through every peer in turn, and checks what arrives."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpcomm
from benchmarks.harness import environment
from benchmarks.launch import adopt_mpi_environment
from benchmarks.peers import Mpich, UnavailableError

KB, MB = 1 << 10, 1 << 20
BLOCK = 0.03  # seconds
FEWEST, MOST = 3, 2000  # iterations of a block
NEVER = 1 << 60
PEERS = ("channel", "channel-frozen", "send", "batch", "cat", "mpich")
STOCK = ("send", "batch", "cat")

Call = Callable[[], Any]
Messages = list[list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """Bytes of each tensor of a message."""

    sizes: tuple[int, ...]
    changing: bool = False  # one tensor has another length in each message, so that no schema comes twice in a row

    def lengths(self, turn: int) -> list[int]:
        """Elements of each tensor of message ``turn``."""
        lengths = [size // 4 for size in self.sizes]
        if self.changing:
            lengths[0] += 1 + turn % 200  # more than an edge remembers
        return lengths


CASES: dict[str, Case] = {
    "1 x 4 B": Case((4,)),
    "1 x 4 KB": Case((4 * KB,)),
    "32 x 4 B": Case((4,) * 32),
    "32 x 4 B changing": Case((4,) * 32, changing=True),
    "32 x 16 KB": Case((16 * KB,) * 32),
    "32 x 16 KB changing": Case((16 * KB,) * 32, changing=True),
    "256 x 1 KB": Case((KB,) * 256),
    "1 x 1 MB": Case((MB,)),
    "8 x 4 KB + 2 x 4 MB": Case((4 * KB,) * 8 + (4 * MB,) * 2),
    "1 x 25 MB": Case((25 * MB,)),
}


class Bouncer(ABC):
    """A way to send tensors to the other rank. Every message is made before the clock runs."""

    name: str

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @abstractmethod
    def prepare(self, messages: Sequence[list[torch.Tensor]]) -> None:
        """The messages of one case."""

    @abstractmethod
    def calls(self) -> tuple[list[Call], Call]:
        """What sends each of the messages, and returns when it may be sent again; and what receives one, as the
        program has it then. Both are timed, with as little around them as can be.
        """

    def tensors(self, received: Any) -> list[torch.Tensor]:
        """Those of the message that came, of which the receiving call returned ``received``."""
        return list(received)

    def can(self, case: Case) -> bool:
        return not case.changing

    def bounce(self, turns: int, sends: list[Call], receive: Call) -> None:
        number = len(sends)
        if self.rank == 0:
            for turn in range(turns):
                sends[turn % number]()
                receive()
        else:
            for turn in range(turns):
                receive()
                sends[turn % number]()


class ChannelBouncer(Bouncer):
    """A dict of tensors through hpcomm.Channel."""

    def __init__(self, rank: int, communicator: hpcomm.Communicator, name: str, **options: Any) -> None:
        super().__init__(rank)
        self.name = name
        self._communicator = communicator
        self._options = options
        self._trees: list[dict[str, torch.Tensor]] = []
        self._works: list[Any] = []

    def prepare(self, messages: Sequence[list[torch.Tensor]]) -> None:
        # One channel a case: a frozen one keeps its first schema.
        self._channel = hpcomm.Channel(self._communicator, 1 - self.rank, **self._options)
        self._trees = [{f"h{i}": tensor for i, tensor in enumerate(message)} for message in messages]

    def can(self, case: Case) -> bool:
        return not (case.changing and self._options.get("schema") == "frozen")

    def calls(self) -> tuple[list[Call], Call]:
        send = self._channel.send
        return [lambda tree=tree: send(tree).wait() for tree in self._trees], self._channel.recv

    def tensors(self, received: Any) -> list[torch.Tensor]:
        return list(received.values())


class StockBouncer(Bouncer):
    """What torch.distributed has, over gloo, into tensors that are there already."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank)
        self.name = name

    def prepare(self, messages: Sequence[list[torch.Tensor]]) -> None:
        self._messages = messages
        self._targets = [torch.empty_like(tensor) for tensor in messages[0]]
        self._lengths = [tensor.numel() for tensor in messages[0]]
        self._flat = torch.empty(sum(t.numel() for t in messages[0]))
        self._incoming = torch.empty_like(self._flat)

    def calls(self) -> tuple[list[Call], Call]:
        return [partial(self._send, message) for message in self._messages], self._receive

    def _send(self, message: list[torch.Tensor]) -> None:
        peer = 1 - self.rank
        if self.name == "send":
            for tensor in message:
                dist.send(tensor, peer)
        elif self.name == "batch":
            self._run([dist.P2POp(dist.isend, tensor, peer) for tensor in message])
        else:
            torch.cat(message, out=self._flat)
            dist.send(self._flat, peer)

    def _receive(self) -> Any:
        peer = 1 - self.rank
        if self.name == "send":
            for tensor in self._targets:
                dist.recv(tensor, peer)
        elif self.name == "batch":
            self._run([dist.P2POp(dist.irecv, tensor, peer) for tensor in self._targets])
        else:
            dist.recv(self._incoming, peer)
            return self._incoming.split(self._lengths)
        return self._targets

    @staticmethod
    def _run(operations: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class MpichBouncer(Bouncer):
    """As many bytes as one block, packed before the clock runs."""

    name = "mpich"

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._mpich = Mpich()

    @property
    def version(self) -> str:
        return self._mpich.version

    def prepare(self, messages: Sequence[list[torch.Tensor]]) -> None:
        self._lengths = [tensor.numel() for tensor in messages[0]]
        self._messages = messages
        self._packed = [torch.cat(message) for message in messages]
        self._incoming = torch.empty_like(self._packed[0])

    def repack(self) -> None:
        for packed, message in zip(self._packed, self._messages, strict=True):
            torch.cat(message, out=packed)

    def tensors(self, received: Any) -> list[torch.Tensor]:
        return list(self._incoming.split(self._lengths))

    def calls(self) -> tuple[list[Call], Call]:
        world, peer = self._mpich._world, 1 - self.rank
        return [partial(world.Send, p.numpy(), peer) for p in self._packed], partial(
            world.Recv, self._incoming.numpy(), peer
        )


class Rank:
    """What one rank does, with the arguments of the command line."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._notes: list[str] = []
        dist.init_process_group("gloo")
        self._mesh = hpcomm.init(dp=1, pp=2)
        self.rank = self._mesh.rank

    def run(self) -> dict[str, Any]:
        """Rank 0's result counts."""
        if self._arguments["tune"]:
            return self._tune()
        if self._arguments["headers"]:
            return self._headers()
        peers = self._make_peers()
        described = environment(self._mesh)
        for peer in peers:
            if isinstance(peer, MpichBouncer):
                described["mpi"] = peer.version
        self._say("".join(f"# {key:<18} {value}\n" for key, value in described.items()))
        for note in self._notes:
            self._say(f"# {note}")
        names = [peer.name for peer in peers]
        self._say(
            f"{'one message':<24}" + "".join(f"{name:>26}" for name in names) + f"{'best stock / channel':>22}  #wrong"
        )
        rows = [self._case(name, CASES[name], peers) for name in self._arguments["cases"]]
        return {"environment": described, "arguments": self._arguments, "rows": rows, "notes": self._notes,
                "wrong": sum(row["wrong"] for row in rows)}  # fmt: skip

    def close(self) -> None:
        dist.barrier()
        self._mesh.close()
        dist.destroy_process_group()

    def _make_peers(self) -> list[Bouncer]:
        peers: list[Bouncer] = []
        for name in self._arguments["peers"]:
            if name == "channel":
                peers.append(ChannelBouncer(self.rank, self._mesh.pp, name))
            elif name == "channel-frozen":
                peers.append(ChannelBouncer(self.rank, self._mesh.pp, name, schema="frozen"))
            elif name == "mpich":
                try:
                    peers.append(MpichBouncer(self.rank))
                except UnavailableError as error:
                    self._notes.append(f"mpich is left out: {error}")
            else:
                peers.append(StockBouncer(self.rank, name))
        return peers

    def _messages(self, case: Case) -> list[list[torch.Tensor]]:
        turns = 200 if case.changing else 1
        every = [case.lengths(turn) for turn in range(turns)]
        # All of one memory: a new schema is timed, not memory that no cache has.
        memory = [torch.zeros(max(lengths)) for lengths in zip(*every, strict=True)]
        return [[part[:length] for part, length in zip(memory, lengths, strict=True)] for lengths in every]

    def _case(self, name: str, case: Case, peers: Sequence[Bouncer]) -> dict[str, Any]:
        able = [peer for peer in peers if peer.can(case)]
        messages = {peer.name: self._messages(case) for peer in able}
        for peer in able:
            peer.prepare(messages[peer.name])
        wrong = sum(self._wrong(peer, messages[peer.name], seed) for peer in able for seed in (1, 2))
        turns = {peer.name: self._arguments["iterations"] or self._turns(peer, messages[peer.name]) for peer in able}
        samples: dict[str, list[float]] = {peer.name: [] for peer in able}
        gc.disable()
        for i in range(self._arguments["rounds"]):
            for peer in [*able[i % len(able) :], *able[: i % len(able)]]:
                samples[peer.name].append(self._block(peer, messages[peer.name], turns[peer.name]) / 2)
        gc.enable()
        wrong += sum(self._wrong(peer, messages[peer.name], 3) for peer in able)
        return self._report(name, case, samples, [peer.name for peer in peers], wrong)

    def _block(self, peer: Bouncer, messages: Messages, turns: int) -> float:
        """Seconds of a round trip, on rank 0; the other rank's number is as good."""
        sends, receive = peer.calls()
        dist.barrier()
        peer.bounce(1, sends, receive)
        start = time.perf_counter()
        peer.bounce(turns, sends, receive)
        return (time.perf_counter() - start) / turns

    def _turns(self, peer: Bouncer, messages: Messages) -> int:
        """As many as fill a block; the same on both ranks."""
        trial = torch.tensor([max(self._block(peer, messages, FEWEST), 1e-7)], dtype=torch.float64)
        dist.broadcast(trial, 0)
        return int(min(MOST, max(FEWEST, BLOCK / trial.item())))

    def _wrong(self, peer: Bouncer, messages: Sequence[list[torch.Tensor]], seed: int) -> int:
        """Tensors that came otherwise than sent, over every message of the case, with values of their own."""
        count = 0
        sends, receive = peer.calls()
        for number, message in enumerate(messages):
            for index, tensor in enumerate(message):
                tensor.copy_(self._values(self.rank, number, index, seed, tensor.numel()))
            if isinstance(peer, MpichBouncer):
                peer.repack()
            if self.rank == 0:
                sends[number]()
            got = peer.tensors(receive())
            for index, tensor in enumerate(got):
                expected = self._values(1 - self.rank, number, index, seed, len(message[index]))
                count += not torch.equal(tensor, expected)
            count += len(got) != len(message)
            if self.rank == 1:
                sends[number]()
        total = torch.tensor([count])
        dist.all_reduce(total)
        return int(total.item())

    @staticmethod
    def _values(rank: int, number: int, index: int, seed: int, length: int) -> torch.Tensor:
        return torch.arange(length, dtype=torch.float32) % 1009 + 10_000.0 * rank + 100.0 * number + index + seed

    def _report(
        self, name: str, case: Case, samples: dict[str, list[float]], names: list[str], wrong: int
    ) -> dict[str, Any]:
        cells, medians = [], {}
        for peer in names:
            if peer not in samples:
                cells.append(f"{'-':>26}")
                continue
            times = samples[peer]
            low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
            medians[peer] = middle
            cells.append(f"{middle * 1e6:>10.1f} us {low * 1e6:>5.0f}-{high * 1e6:<6.0f}")
        stock = [peer for peer in STOCK if peer in medians]
        ratio = None
        if stock:
            best = min(stock, key=lambda peer: medians[peer])
            ratio = statistics.median(b / c for b, c in zip(samples[best], samples["channel"], strict=True))
        shown = f"{best} {ratio:.1f}x" if ratio else "-"
        self._say(f"{name:<24}" + "".join(cells) + f"{shown:>22}  {wrong:>6}")
        return {"case": name, "bytes": sum(case.sizes), "tensors": len(case.sizes), "seconds": samples,
                "medians": medians, "best_stock_over_channel": ratio, "wrong": wrong}  # fmt: skip

    # --- --tune ---------------------------------------------------------------------------------------------------

    def _tune(self) -> dict[str, Any]:
        """8 tensors of a size, all packed against none packed."""
        described = environment(self._mesh)
        self._say("".join(f"# {key:<18} {value}\n" for key, value in described.items()))
        self._say(f"{'8 tensors of':>14}{'packed':>14}{'as they are':>14}{'as they are / packed':>24}")
        rows = []
        wrong = 0
        for size in (4 * KB << shift for shift in range(11)):
            case = Case((size,) * 8)
            ways = [
                ChannelBouncer(self.rank, self._mesh.pp, "packed", direct_from=NEVER),
                ChannelBouncer(self.rank, self._mesh.pp, "as they are", direct_from=1),
            ]
            messages = {way.name: self._messages(case) for way in ways}
            for way in ways:
                way.prepare(messages[way.name])
                wrong += self._wrong(way, messages[way.name], 1)
            turns = [self._arguments["iterations"] or self._turns(way, messages[way.name]) for way in ways]
            samples: dict[str, list[float]] = {way.name: [] for way in ways}
            for _ in range(self._arguments["rounds"]):
                for way, number in zip(ways, turns, strict=True):
                    samples[way.name].append(self._block(way, messages[way.name], number) / 2)
            packed, direct = (statistics.median(samples[way.name]) for way in ways)
            self._say(f"{size // KB:>11} KB{packed * 1e6:>11.1f} us{direct * 1e6:>11.1f} us{direct / packed:>24.2f}")
            rows.append({"bytes": size, "seconds": samples})
        return {"environment": described, "arguments": self._arguments, "rows": rows, "wrong": wrong}

    # --- --headers ------------------------------------------------------------------------------------------------

    def _headers(self) -> dict[str, Any]:
        """The same message with a header and without one, in turn; and with a schema that is always another.

        Without one travels what is short, and through shared memory.
        """
        described = environment(self._mesh)
        self._say("".join(f"# {key:<18} {value}\n" for key, value in described.items()))
        self._say(f"{'one message':<16}{'no header':>12}{'header':>12}{'new schema':>12}"
                  f"{'header, both sides':>24}{'new schema, more':>24}")  # fmt: skip
        rows: list[dict[str, Any]] = []
        wrong = 0
        for number in (1, 3, 32):
            name = f"{number} x 4 B"
            has_frozen = number <= 3 and self._mesh.pp.transport == "shm"
            same, changing = Case((4,) * number), Case((4,) * number, changing=True)
            ways = [
                (ChannelBouncer(self.rank, self._mesh.pp, "header"), same),
                (ChannelBouncer(self.rank, self._mesh.pp, "new schema"), changing),
            ]
            if has_frozen:
                ways.insert(0, (ChannelBouncer(self.rank, self._mesh.pp, "no header", schema="frozen"), same))
            messages = {way.name: self._messages(case) for way, case in ways}
            for way, _ in ways:
                way.prepare(messages[way.name])
                wrong += self._wrong(way, messages[way.name], 1)
            turns = [self._arguments["iterations"] or self._turns(way, messages[way.name]) for way, _ in ways]
            samples: dict[str, list[float]] = {way.name: [] for way, _ in ways}
            gc.disable()
            for i in range(self._arguments["rounds"]):
                order = list(zip(ways, turns, strict=True))
                for (way, _), count in [*order[i % len(ways) :], *order[: i % len(ways)]]:
                    samples[way.name].append(self._block(way, messages[way.name], count) / 2)
            gc.enable()
            row: dict[str, Any] = {"case": name, "seconds": samples}
            for what, way, other in (("header", "header", "no header"), ("new_schema", "new schema", "header")):
                if other in samples:
                    row[what] = [a - b for a, b in zip(samples[way], samples[other], strict=True)]
            cells = "".join(
                f"{statistics.median(samples[way]) * 1e6:>9.1f} us" if way in samples else f"{'-':>12}"
                for way in ("no header", "header", "new schema")
            )
            for what in ("header", "new_schema"):
                costs = row.get(what, [])
                low, middle, high = statistics.quantiles(costs, n=4) if len(costs) > 1 else (costs or [0.0]) * 3
                cells += f"{middle * 1e6:>10.1f} us {low * 1e6:>4.1f}-{high * 1e6:<5.1f}" if costs else f"{'-':>24}"
            self._say(f"{name:<16}{cells}")
            rows.append(row)
        return {"environment": described, "arguments": self._arguments, "rows": rows, "wrong": wrong}

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def main() -> None:
    adopt_mpi_environment()
    arguments, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    try:
        rank = Rank(arguments)
        result = rank.run()
        if rank.rank == 0:
            file.write_text(json.dumps(result))
        rank.close()
    except BaseException:
        print(f"rank {os.environ['RANK']}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        # At once: an orderly exit would wait for the other ranks, in MPI and elsewhere.
        os._exit(1)


if __name__ == "__main__":
    main()
