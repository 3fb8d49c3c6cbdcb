"""Writes the GPU figures of README.md from benchmarks/results/gpu-*.json, between two comments. Files that are named
for a commit are records of older revisions, which docs quote.

python scripts/gpu_table.py            # rewrites the block
python scripts/gpu_table.py --check    # exit code 1 when README.md is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blocks import replaced

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
README = ROOT / "README.md"
BLOCK = "GPU figures"
NONE = "not yet measured"


class Row(NamedTuple):
    """One line of the table: which target of which benchmark it shows."""

    label: str
    benchmark: str
    target: str
    wanted: str  # in the benchmark's words


COPY_RATE = ">= 80 % of the copy rate"
PER_TENSOR = ">= 5x faster than a copy_ per tensor"
HOST = "< 15 us"
NO_WRAPPER = "one rank: within 2 % of no wrapper"
STOCK_DDP = "not slower than stock DDP at its best"
UNDER_COMPUTE = "> 90 % of the reductions' time under compute"
STOCK_PIPELINE = "not slower than torch's 1F1B"
BATCH = "not slower than batch_isend_irecv"

ROWS = (
    Row("pack 1 x 64 MB, share of the copy rate", "pack", "pack 1 x 64 MB", COPY_RATE),
    Row("pack 1 x 1 GB, share of the copy rate", "pack", "pack 1 x 1 GB", COPY_RATE),
    Row("pack 64 x 1 MB, share of the copy rate", "pack", "pack 64 x 1 MB", COPY_RATE),
    Row("unpack 64 x 1 MB, share of the copy rate", "pack", "unpack 64 x 1 MB", COPY_RATE),
    Row("pack 64 x 1 MB with a scale", "pack", "pack 64 x 1 MB, scaled", COPY_RATE),
    Row("pack 64 x 1 MB, float32 to bfloat16", "pack", "pack 64 x 1 MB, float32 to bfloat16", COPY_RATE),
    Row("pack 64 x 1 MB with the NaN check", "pack", "pack 64 x 1 MB, checked for NaN", COPY_RATE),
    Row(
        "pack 1,000 x 4 KB against a copy per tensor",
        "pack",
        "pack 1,000 x 4 KB",
        PER_TENSOR,
    ),
    Row(
        "unpack 1,000 x 4 KB against a copy per tensor",
        "pack",
        "unpack 1,000 x 4 KB",
        PER_TENSOR,
    ),
    Row("host time of an all-reduce, one rank", "issue", "all_reduce of 1 KB, 1 rank(s)", HOST),
    Row("host time of an all-reduce, two ranks", "issue-2", "all_reduce of 1 KB, 2 rank(s)", HOST),
    Row("host time of a bucket, one rank", "issue", "a bucket of 16 gradients, 1 rank(s)", HOST),
    Row("host time of a bucket, two ranks", "issue-2", "a bucket of 16 gradients, 2 rank(s)", HOST),
    Row("host time of a fused send, two ranks", "issue-2", "a send of 32 x 4 KB, 2 rank(s)", HOST),
    Row("DDP of 8 x Linear(4096), one rank", "ddp", "8 x Linear(4096), batch 512", NO_WRAPPER),
    Row("DDP of 200 x Linear(128), one rank", "ddp", "200 x Linear(128), batch 64", NO_WRAPPER),
    Row("DDP of 24 x Linear(1024), one rank", "ddp", "24 x Linear(1024), batch 1024", NO_WRAPPER),
    Row("DDP of 24 x Linear(2048), one rank", "ddp", "24 x Linear(2048), batch 2048", NO_WRAPPER),
    Row(
        "DDP of 8 x Linear(4096), two ranks",
        "ddp-2",
        "8 x Linear(4096), batch 512",
        STOCK_DDP,
    ),
    Row(
        "DDP of 200 x Linear(128), two ranks",
        "ddp-2",
        "200 x Linear(128), batch 64",
        STOCK_DDP,
    ),
    Row("DDP of 24 x Linear(1024), two ranks", "ddp-2", "24 x Linear(1024), batch 1024", STOCK_DDP),
    Row("DDP of 24 x Linear(2048), two ranks", "ddp-2", "24 x Linear(2048), batch 2048", STOCK_DDP),
    Row("reductions of 24 x Linear(2048) under compute", "ddp-2", "24 x Linear(2048), batch 2048", UNDER_COMPUTE),
    Row("reductions of 24 x Linear(1024) under compute", "ddp-2", "24 x Linear(1024), batch 1024", UNDER_COMPUTE),
    Row("reductions of 200 x Linear(128) under compute", "ddp-2", "200 x Linear(128), batch 64", UNDER_COMPUTE),
    Row(
        "reductions of 8 x Linear(4096) under compute",
        "ddp-2",
        "8 x Linear(4096), batch 512",
        UNDER_COMPUTE,
    ),
    Row(
        "message of 32 x 16 KB both ways, frozen schema",
        "channel",
        '32 x 16 KB, both ways: hpcomm, schema="frozen"',
        BATCH,
    ),
    Row(
        "message of 8 x 8 MB both ways, frozen schema",
        "channel",
        '8 x 8 MB, both ways: hpcomm, schema="frozen"',
        BATCH,
    ),
    Row(
        "message of 1 x 64 MB both ways, frozen schema",
        "channel",
        '1 x 64 MB, both ways: hpcomm, schema="frozen"',
        BATCH,
    ),
    Row("message of 1 x 64 MB one way", "channel", "1 x 64 MB, one way: hpcomm", BATCH),
    Row(
        "step of two stages of 8 x Linear(2048)",
        "pipeline",
        "8 x Linear(2048) + GELU, batch 2048, 8 microbatches",
        STOCK_PIPELINE,
    ),
    Row(
        "step of two stages of 8 x Linear(512)",
        "pipeline",
        "8 x Linear(512) + GELU, batch 256, 8 microbatches",
        STOCK_PIPELINE,
    ),
)


def cell(document: dict[str, Any], row: Row) -> str:
    """What was measured; or why it was not."""
    found = document.get("benchmarks", {}).get(row.benchmark)
    if found is None:
        return NONE
    for target in found.get("targets", []):
        if target["name"] == row.target and target["wanted"] == row.wanted:
            return target["got"] + {True: "", False: " (missed)", None: " (not judged)"}[target["met"]]
    if found["status"] != "failed":
        return NONE
    was_cut = found.get("error", "").startswith("interrupted") and not found.get("tracebacks")
    return "the time was up" if was_cut else "failed"


def title(document: dict[str, Any]) -> str:
    """Where it was measured."""
    environment = document["environment"]
    return f"{environment['gpu']}, torch {environment['torch']}, NCCL {environment['nccl']}"


def column(document: dict[str, Any]) -> str:
    """A column's head: what tells it from the others."""
    environment = document["environment"]
    shares = {True: ", ranks share it by MPS", False: ", ranks take turns on it"}.get(environment.get("mps"), "")
    return f"{environment['gpu']}, {environment['commit'][:7]}{shares}"


def render(results: Path) -> str:
    """The block between the comments."""
    paths = [path for path in results.glob("gpu-bench-*.json") if not re.search(r"-[0-9a-f]{7}$", path.stem)]
    documents = [json.loads(path.read_text()) for path in paths]
    documents.sort(key=lambda document: document["date"])
    if not documents:
        return f"GPU figures: {NONE}.\n\n{tests(results)}"
    heads = [column(document) for document in documents]
    lines = [f"| | target | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for row in ROWS:
        cells = [cell(document, row) for document in documents]
        if any(each != NONE for each in cells):
            cells = ["" if each == NONE else each for each in cells]
        lines.append(f"| {row.label} | {row.wanted} | {' | '.join(cells)} |")
    lines += [""]
    for document in documents:
        lines += [f"- {title(document)}: `{document['command']}`, {document['date']}, commit "
                  f"{document['environment']['commit']}."]  # fmt: skip
    return "\n".join([*lines, "", tests(results)])


def tests(results: Path) -> str:
    """How the tests on a GPU went."""
    path = results / "gpu-test.json"
    if not path.exists():
        return f"Tests on a GPU (`make gpu-test`): {NONE}."
    document = json.loads(path.read_text())
    if "counts" not in document:
        return f"Tests on a GPU (`make gpu-test`): {document.get('failed', 'something')} failed."
    counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(document["counts"].items()))
    if document.get("exit_code", 0) != 0 and not {"failed", "error"} & set(document["counts"]):
        counts += f", and exit code {document['exit_code']}"  # a crash, or the time was up: no test says so
    return f"Tests on a GPU (`make gpu-test`): {counts}; {title(document)}, commit {document['environment']['commit']}."


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    text = README.read_text()
    new = replaced(text, BLOCK, render(RESULTS))
    if "--check" in arguments:
        if new != text:
            print("README.md has other GPU figures than benchmarks/results: run scripts/gpu_table.py", file=sys.stderr)
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
