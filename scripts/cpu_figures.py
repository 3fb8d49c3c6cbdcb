"""The CPU figures: measures them, and writes them into README.md and benchmarks/results/README.md from the JSON.

python scripts/cpu_figures.py               # rewrites both from benchmarks/results/*.json
python scripts/cpu_figures.py --check       # exit code 1 when they are not what the results say
python scripts/cpu_figures.py --run [NAME]  # measures all files, or those whose names contain NAME, then rewrites
python scripts/cpu_figures.py --run [NAME] --machine M   # the same into benchmarks/results/M/, for the last section

Measuring all (`make figures`) takes half an hour, on a machine that does nothing else. MPICH is left out where
mpi4py and mpich are not installed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_tables
from blocks import replaced
from cpu_tables import Section, span, times

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
README, ALL = ROOT / "README.md", RESULTS / "README.md"
BLOCK = "CPU figures"

COLLECTIVES = "python -m benchmarks.collectives"
OPERATIONS = "all_reduce,all_gather,reduce_scatter,broadcast,sendrecv,pingpong"
PIPELINE = "torchrun --standalone --nproc-per-node"


class File(NamedTuple):
    """One file of results: how it is made, and what reads it."""

    name: str
    title: str
    command: str  # without --json
    read: Callable[[Any], Section]


FILES = (
    File("ddp-cpu-2-ranks", "Data-parallel steps, 2 ranks",
         "python -m benchmarks.ddp --ranks 2 --rounds 10 --plot docs/ddp.svg", cpu_tables.ddp),
    File("ddp-cpu-4-ranks", "Data-parallel steps, 4 ranks on 2 cores",
         "python -m benchmarks.ddp --ranks 4 --rounds 6 --models Linear", cpu_tables.ddp),
    File("ddp-alone-cpu-2-ranks", "Data-parallel steps, each variant in processes of its own",
         "python -m benchmarks.ddp --ranks 2 --alone --models Linear --rounds 20", cpu_tables.ddp_alone),
    File("ddp-memory-cpu-2-ranks", "Peak memory of data-parallel steps",
         "python -m benchmarks.ddp --ranks 2 --memory", cpu_tables.ddp_memory),
    File("ddp-hooks-cpu-2-ranks", "A parameter's hook",
         "python -m benchmarks.ddp --ranks 2 --hooks --rounds 8", cpu_tables.ddp_hooks),
    File("ddp-parameters-cpu-2-ranks", "Steps by number of parameters",
         "python -m benchmarks.ddp --ranks 2 --parameters --rounds 30 --plot docs/ddp-parameters.svg",
         cpu_tables.ddp_parameters),
    File("p2p-cpu-2-ranks", "Messages through shared memory",
         "python -m benchmarks.p2p --rounds 15 --vs channel,send,batch,cat,mpich", cpu_tables.messages),
    File("p2p-headers-cpu-2-ranks", "Headers and schemas of messages",
         "python -m benchmarks.p2p --headers --rounds 15", cpu_tables.headers),
    File("p2p-gloo-cpu-2-ranks", "Messages over gloo",
         "python -m benchmarks.p2p --transport gloo --vs channel,send,batch,cat --rounds 5", cpu_tables.messages),
    File("p2p-tune-cpu-2-ranks", "Messages of 8 tensors, packed and as they are",
         "python -m benchmarks.p2p --tune --rounds 9", cpu_tables.tune),
    File("p2p-tune-gloo-cpu-2-ranks", "Messages of 8 tensors over gloo, packed and as they are",
         "python -m benchmarks.p2p --tune --transport gloo --rounds 5", cpu_tables.tune),
    File("pack-cpu", "Pack kernels",
         "python -m benchmarks.pack --totals 1,16 --rounds 5", cpu_tables.pack),
    File("pipeline-linear-cpu-dp2-pp2", "Pipelines, 2 replicas of 2 stages",
         f"{PIPELINE} 4 -m benchmarks.pipeline --dp 2 --models linear --schedules 1f1b --rounds 20",
         cpu_tables.pipeline),
    File("pipeline-compute-cpu-2-ranks", "Pipelines of 2 stages, computation",
         f"{PIPELINE} 2 -m benchmarks.pipeline --models compute --schedules 1f1b,zbv --rounds 12",
         cpu_tables.pipeline),
    File("pipeline-messages-cpu-2-ranks", "Pipelines of 2 stages, messages",
         f"{PIPELINE} 2 -m benchmarks.pipeline --models small,large --schedules 1f1b,zbv --rounds 15",
         cpu_tables.pipeline),
    File("pipeline-cpu-4-ranks", "Pipelines of 4 stages on 2 cores",
         f"{PIPELINE} 4 -m benchmarks.pipeline --models linear,small --schedules 1f1b,zbv --rounds 12",
         cpu_tables.pipeline),
    File("collectives-cpu-2-ranks", "Collectives, 2 ranks",
         f"{COLLECTIVES} --ranks 2 --ops {OPERATIONS} -b 4 -e 64M -f 64 --vs hpcomm-zero,c10d-hpcomm,gloo,mpich "
         "--rounds 5 --timeout 900", cpu_tables.collectives),
    File("collectives-fresh-cpu-2-ranks", "Collectives of what was just written, 2 ranks",
         f"{COLLECTIVES} --fresh --ranks 2 --ops {OPERATIONS} -b 4 -e 64M -f 64 --vs mpich --rounds 5 --timeout 900",
         cpu_tables.collectives),
    File("collectives-25MB-cpu-2-ranks", "The all_reduce of 25 MB, 2 ranks",
         f"{COLLECTIVES} --ranks 2 -b 25M -e 25M --vs hpcomm-zero,c10d-hpcomm,gloo,mpich --rounds 9",
         cpu_tables.collectives),
    File("collectives-cpu-4-ranks", "Collectives, 4 ranks on 2 cores",
         f"{COLLECTIVES} --ranks 4 --ops all_reduce,all_gather,broadcast -b 4 -e 25M -f 2560 --vs c10d-hpcomm,gloo "
         "--rounds 7", cpu_tables.collectives),
    File("collectives-mpich-cpu-4-ranks", "Collectives against MPICH, 4 ranks on 2 cores",
         f"{COLLECTIVES} --ranks 4 --ops all_reduce,all_gather,reduce_scatter,broadcast,sendrecv -b 4 -e 4M -f 1024 "
         "-w 1 --vs mpich --rounds 3", cpu_tables.collectives),
    File("collectives-cpu-8-ranks", "Collectives, 8 ranks on 2 cores",
         f"{COLLECTIVES} --ranks 8 --ops all_reduce,all_gather,broadcast -b 4 -e 25M -f 2560 --vs c10d-hpcomm,gloo "
         "--rounds 5", cpu_tables.collectives),
    File("collectives-hosts-cpu-4-ranks", "Collectives over two hosts, 4 ranks of one machine that pretend to be there",
         f"{COLLECTIVES} --ranks 4 --hosts 2 --ops all_reduce,all_gather,reduce_scatter,broadcast -b 4 -e 25M -f 2560 "
         "--vs gloo --rounds 7", cpu_tables.collectives),
    File("collectives-link-cpu-4-ranks", "Collectives over two hosts and a link of 1 Gbit/s, 4 ranks",
         f"{COLLECTIVES} --ranks 4 --hosts 2 --link 1gbit --ops all_reduce,all_gather,reduce_scatter,broadcast "
         "-b 4 -e 25M -f 2560 --vs gloo --rounds 5", cpu_tables.collectives),
    File("ddp-link-cpu-4-ranks", "Data-parallel steps over two hosts and a link of 1 Gbit/s, 4 ranks",
         "python -m benchmarks.ddp --ranks 4 --hosts 2 --link 1gbit --rounds 8 --models 'Linear(1024)'",
         cpu_tables.ddp_link),
    File("pipeline-link-cpu-2-ranks", "Pipelines of 2 stages on two hosts, a link of 300 Mbit/s between them",
         "python -m benchmarks.pipeline --ranks 2 --hosts 2 --link 300mbit --models wide --schedules 1f1b,eager_1f1b "
         "--rounds 12", cpu_tables.pipeline),
    File("pipeline-link-cpu-dp2-pp2", "Pipelines of 2 stages on two hosts, a link of 1 Gbit/s between them, 2 replicas",
         "python -m benchmarks.pipeline --ranks 4 --dp 2 --hosts 2 --link 1gbit --models linear,large "
         "--schedules 1f1b,eager_1f1b --rounds 8", cpu_tables.pipeline),
)  # fmt: skip

# What README shows, of all lines.
SHOWN = (
    "DDP step",
    "message of 32 x 4 B", "message of 32 x 16 KB", "message of 1 x 25 MB", "message of 8 x 4 KB + 2 x 4 MB over gloo",
    "Pipeline step, linear 1f1b", "Pipeline step, compute", "Pipeline step, large", "Pipeline step, small 1f1b, 2",
    "Pipeline step, wide",
    "`torch.distributed`, all_reduce of 4 B, 2", "`torch.distributed`, all_reduce of 1 MB, 2",
    "`torch.distributed`, all_reduce of 25 MB",
)  # fmt: skip
HIDDEN = ("changing",)

# What an aim is, for README; some of them stand for all.
AIMS = (
    "An aim is a bound that the project sets itself in [scripts/cpu_tables.py](scripts/cpu_tables.py): at least 0.95x\n"
    "of MPICH, under 5 us for a Channel's round trip of 4 B, packing at 80 % of the copy rate, and so on."
)


class Result(NamedTuple):
    """A file that is there."""

    file: File
    document: dict[str, Any]
    section: Section


def results(folder: Path) -> list[Result]:
    """Of the files that are there."""
    found = []
    for file in FILES:
        path = folder / f"{file.name}.json"
        if path.exists():
            document = json.loads(path.read_text())
            found.append(Result(file, document, file.read(document)))
    return found


def summary(found: Sequence[Result]) -> str:
    """README's block: the best stock way and ours, then what misses its aim."""
    lines = [line for result in found for line in result.section.lines
             if line.what.startswith(SHOWN) and not any(word in line.what for word in HIDDEN)]  # fmt: skip
    table = cpu_tables.rows(
        ["", "best stock way, gloo", "hpcomm", "by rounds"],
        [[line.what, span(line.stock), span(line.ours), times(line.ratio)] for line in lines],
    )
    aims = [aim for result in found for aim in result.section.aims]
    missed = [f"- {aim.what}: {aim.got}, aim {aim.wanted}" for aim in aims if not aim.met]
    count = f"Of {len(aims)} aims {len(aims) - len(missed)} are met in these runs"
    head = [*table, "", measured_at(found), "", AIMS, f"{count}; missed:" if missed else f"{count}."]
    return "\n".join([*head, "", *missed]).rstrip()


def measured_at(found: Sequence[Result]) -> str:
    """The revisions, for a file is measured anew when what it measures has changed."""
    by_revision: dict[str, list[str]] = {}
    for result in found:
        by_revision.setdefault(result.document["environment"].get("revision", "unknown"), []).append(result.file.name)
    files = [f"- {revision[:7]}: {', '.join(names)}" for revision, names in by_revision.items()]
    return "\n".join(["The files of results, by the revision that they were measured at:", "", *files])


def aims_of(result: Result) -> list[str]:
    """Of a file: how many of its aims are met, and which are not."""
    missed = [f"{aim.what}: {aim.got}, aim {aim.wanted}" for aim in result.section.aims if not aim.met]
    if not result.section.aims:
        return []
    met = len(result.section.aims) - len(missed)
    return [f"Aims met: {met} of {len(result.section.aims)}.", *(f"- missed: {line}" for line in missed)]


def environment_of(result: Result) -> str:
    """Where and of what it was measured."""
    environment = result.document["environment"]
    return ", ".join(f"{key} {environment[key]}" for key in ("cpu", "cores", "torch", "mpi", "revision")
                     if key in environment)  # fmt: skip


def everything(found: Sequence[Result]) -> str:
    """benchmarks/results/README.md."""
    parts = [
        "# Figures of the CPU half",
        "",
        "Written by `python scripts/cpu_figures.py` from the files beside it, which `make figures` measures anew.",
        "Peers take turns in the same processes, results are verified beside the timing. Medians are shown; ratios are",
        "medians of the rounds' own. [What the columns are](../README.md). An aim is a bound that the project sets",
        "itself in [scripts/cpu_tables.py](../../scripts/cpu_tables.py).",
    ]
    for result in found:
        parts += ["", f"## {result.file.title}", "", f"`{result.file.command}`", "",
                  f"{environment_of(result)}; [all samples]({result.file.name}.json)", "",
                  *result.section.table]  # fmt: skip
        aims = aims_of(result)
        parts += ["", *aims] if aims else []
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        parts += ["", f"## On another machine: {folder.name}"]
        for result in results(folder):
            parts += ["", f"{result.file.title}: {environment_of(result)}; "
                      f"[all samples]({folder.name}/{result.file.name}.json)"]  # fmt: skip
            aims = aims_of(result)
            parts += ["", *aims] if aims else []
    return "\n".join(parts) + "\n"


def run(part: str, folder: Path) -> None:
    """Measures the files whose names contain ``part``, one after the other; plots are of the first machine."""
    folder.mkdir(exist_ok=True)
    for file in FILES:
        if part in file.name:
            print(f"== {file.command}", flush=True)
            command = [*shlex.split(file.command), "--json", str(folder.relative_to(ROOT) / f"{file.name}.json")]
            if folder != RESULTS and "--plot" in command:
                at = command.index("--plot")
                del command[at : at + 2]
            if command[0] == "python":
                command[0] = sys.executable
            subprocess.run(command, check=True, cwd=ROOT)


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", nargs="?", const="", metavar="NAME")
    parser.add_argument("--machine", default="", metavar="M")
    options = parser.parse_args(arguments)
    if options.machine and options.run is None:
        parser.error("--machine says where --run writes")
    if options.run is not None:
        run(options.run, RESULTS / options.machine)
    found = results(RESULTS)
    new = {README: replaced(README.read_text(), BLOCK, summary(found)), ALL: everything(found)}
    stale = [path for path, text in new.items() if not path.exists() or path.read_text() != text]
    if options.check:
        for path in stale:
            print(f"{path} has other figures than {RESULTS}: run scripts/cpu_figures.py", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(new[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
