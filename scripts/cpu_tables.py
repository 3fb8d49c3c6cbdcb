"""Tables and aims from the JSON of the CPU benchmarks: one function for each kind of file, each gives a Section.

Ratios are taken round by round, of samples of the same round, and their median is shown: what slowed the machine down
for both cancels. An aim is met or missed by the medians of the run in the file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Document = Mapping[str, Any]
Samples = Sequence[float]

HALVED = "stock, fp16 hook"
STOCK_DDP = ("stock", "stock, bucket views", "stock, batched copies", HALVED)
STOCK_MESSAGES = ("send", "batch", "cat")
COMPUTE, FLOOR = "compute only", "floor: pack and reduce"
DDP_AIMS = {
    (2, "8 x Linear(1024), batch 32"): 1.5,
    (2, "4 x Linear(2048), batch 8"): 1.7,
    (2, "200 x Linear(64), batch 16"): 1.2,
    (4, "8 x Linear(1024), batch 32"): 1.4,
    (4, "4 x Linear(2048), batch 8"): 1.6,
    (4, "200 x Linear(64), batch 16"): 1.25,
}
# Bytes from which tensors of a message travel as they are, by default: csrc/engine/edge.cpp.
DIRECT_FROM = {"shm": 2 << 20, "c10d": 256 << 10}
MICROSECOND, MILLISECOND = 1e-6, 1e-3


class Aim(NamedTuple):
    """What the design asks for, and what the file says."""

    what: str
    wanted: str
    got: str
    met: bool


class Line(NamedTuple):
    """A line of README's table: seconds of the best stock way and of ours, and the ratio by rounds."""

    what: str
    stock: float
    ours: float
    ratio: float


class Section(NamedTuple):
    """One file: its table, what it says of the aims, and what README shows of it."""

    table: list[str]
    aims: list[Aim]
    lines: list[Line]


def by_rounds(theirs: Samples, ours: Samples) -> float:
    """How many times as fast ours is: the median of the rounds' own ratios."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def span(seconds: float) -> str:
    """A time with its unit."""
    if seconds < 0.1 * MILLISECOND:
        return f"{seconds / MICROSECOND:.1f} us"
    if seconds < MILLISECOND:
        return f"{seconds / MICROSECOND:.0f} us"
    return f"{seconds / MILLISECOND:.{2 if seconds < 10 * MILLISECOND else 1}f} ms"


def size(number: int) -> str:
    """Bytes as a person writes them."""
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:g} {unit}"
    return f"{number} B"


def times(ratio: float) -> str:
    """A ratio."""
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(line)} |" for line in body)]


def collectives(document: Document) -> Section:
    """benchmarks.collectives: every operation and size, against gloo and MPICH where they took part."""
    body, aims, lines = [], [], []
    peers = document["arguments"]["peers"]
    fresh = ", just written" if document["arguments"].get("fresh") else ""
    for row in (row for job in document["jobs"] for row in job["rows"]):
        samples = {name: [s * MICROSECOND for s in peer["samples_us"]] for name, peer in row["peers"].items()}
        median = {name: statistics.median(s) for name, s in samples.items()}
        what, ranks = f"{row['operation']} of {size(row['size'])}{fresh}", row["ranks"]
        ratios = [times(by_rounds(samples[name], samples["hpcomm"])) if name in samples else ""
                  for name in ("gloo", "mpich") if name in peers]  # fmt: skip
        body.append([what, *(span(median[name]) if name in median else "" for name in peers), *ratios])
        if "mpich" in samples and row["operation"] != "all_to_all" and ranks in (2, 4):
            ratio = by_rounds(samples["mpich"], samples["hpcomm"])
            aims.append(Aim(f"{what}, {ranks} ranks, against MPICH", "0.95x", times(ratio), ratio >= 0.95))
        if row["operation"] == "all_reduce" and not fresh:
            aims += _of_all_reduce(row, samples)
            if "gloo" in samples and "c10d-hpcomm" in samples:
                ratio = by_rounds(samples["gloo"], samples["c10d-hpcomm"])
                name = f"`torch.distributed`, {what}, {ranks} ranks"
                lines.append(Line(name, median["gloo"], median["c10d-hpcomm"], ratio))
    heads = [f"{name} / hpcomm" for name in ("gloo", "mpich") if name in peers]
    return Section(rows(["", *peers, *heads], body), aims, lines)


def _of_all_reduce(row: Document, samples: Mapping[str, Samples]) -> Iterator[Aim]:
    ranks, bytes_ = row["ranks"], row["size"]
    what = f"all_reduce of {size(bytes_)}, {ranks} ranks"
    if bytes_ == 4 and ranks in (2, 4) and "c10d-hpcomm" in samples:
        most, seconds = {2: 8e-6, 4: 40e-6}[ranks], statistics.median(samples["c10d-hpcomm"])
        yield Aim(f"{what}, through torch.distributed", f"at most {span(most)}", span(seconds), seconds <= most)
    if bytes_ == 4 and ranks == 2:
        seconds = statistics.median(samples["hpcomm"])
        yield Aim(f"{what}, Communicator", "under 3 us", span(seconds), seconds < 3e-6)
    if bytes_ == 25 << 20 and ranks in (2, 4) and {"gloo", "c10d-hpcomm"} <= samples.keys():
        least, ratio = {2: 4.5, 4: 2.5}[ranks], by_rounds(samples["gloo"], samples["c10d-hpcomm"])
        yield Aim(f"{what}, through torch.distributed against gloo", times(least), times(ratio), ratio >= least)
    if bytes_ == 25 << 20 and "hpcomm-zero" in samples:
        ratio = by_rounds(samples["hpcomm"], samples["hpcomm-zero"])
        yield Aim(f"{what}, zero-copy against copying", "1.4x", times(ratio), ratio >= 1.4)


def ddp(document: Document) -> Section:
    """benchmarks.ddp: the step of every model and variant."""
    body, aims, lines = [], [], []
    ranks = document["arguments"]["ranks"]
    models: Mapping[str, Mapping[str, Samples]] = document["seconds"]
    variants = list(dict.fromkeys(name for samples in models.values() for name in samples))
    for model, samples in models.items():
        median = {name: statistics.median(s) for name, s in samples.items()}
        best = min((name for name in STOCK_DDP if name in samples), key=median.__getitem__)
        ratio, what = by_rounds(samples[best], samples["hpcomm"]), f"DDP step of {model}, {ranks} ranks"
        above = statistics.median(a - b for a, b in zip(samples["hpcomm"], samples[COMPUTE], strict=True))
        most = 1.5 * median[FLOOR] + MILLISECOND
        body.append([model, *(f"{median[name] / MILLISECOND:.1f}" for name in variants), times(ratio)])
        lines.append(Line(what, median[best], median["hpcomm"], ratio))
        aims.append(Aim(f"{what}, above computation alone", f"at most {span(most)} (1.5 floors + 1 ms)",
                        span(max(above, 0.0)), above <= most))  # fmt: skip
        least = DDP_AIMS.get((ranks, model))
        if least is not None:
            aims.append(Aim(f"{what}, against the best stock variant", times(least), times(ratio), ratio >= least))
    return Section(rows(["ms a step", *variants, "best stock on gloo / hpcomm"], body), aims, lines)


def ddp_link(document: Document) -> Section:
    """benchmarks.ddp --link: gradients as they are, and those that travel in 16 bits."""
    body, lines = [], []
    arguments = document["arguments"]
    models: Mapping[str, Mapping[str, Samples]] = document["seconds"]
    variants = list(dict.fromkeys(name for samples in models.values() for name in samples))
    for model, samples in models.items():
        median = {name: statistics.median(s) for name, s in samples.items()}
        exact = min((name for name in STOCK_DDP if name in samples and name != HALVED), key=median.__getitem__)
        cells = [f"{median[name] / MILLISECOND:.0f}" for name in variants]
        for bits, theirs, ours in (("", exact, "hpcomm"), (", in 16 bits", HALVED, "hpcomm, bfloat16")):
            ratio = by_rounds(samples[theirs], samples[ours])
            where = f"{arguments['ranks']} ranks on {arguments['hosts']} hosts, {arguments['link']}"
            lines.append(Line(f"DDP step of {model}, {where}{bits}", median[theirs], median[ours], ratio))
            cells.append(times(ratio))
        body.append([model, *cells])
    heads = ["best stock in 32 bits / hpcomm", "stock, fp16 hook / hpcomm, bfloat16"]
    return Section(rows(["ms a step", *variants, *heads], body), [], lines)


def ddp_memory(document: Document) -> Section:
    """benchmarks.ddp --memory: MiB above the process before."""
    body, aims = [], []
    models: Mapping[str, Mapping[str, Mapping[str, float]]] = document["memory"]
    variants = list(dict.fromkeys(name for figures in models.values() for name in figures))
    for model, figures in models.items():
        body.append([model, *(f"{figures[name]['peak']:.1f}" if name in figures else "" for name in variants)])
        ours, stock = figures["hpcomm"]["peak"], figures["stock, bucket views"]["peak"]
        # What a peak differs by from run to run.
        aims.append(Aim(f"peak memory of {model}, 2 ranks", f"stock's with bucket views, {stock:.1f} MiB (+ 0.2)",
                        f"{ours:.1f} MiB", ours <= stock + 0.2))  # fmt: skip
    return Section(rows(["MiB", *variants], body), aims, [])


def ddp_alone(document: Document) -> Section:
    """benchmarks.ddp --alone: each variant in processes of its own, by what malloc does with freed memory."""
    body, aims = [], []
    names: list[str] = []
    for model, by_malloc in document["alone"].items():
        for malloc, by_name in by_malloc.items():
            names = list(by_name)
            median = {name: statistics.median(figures["seconds"]) for name, figures in by_name.items()}
            faults = {name: statistics.median(figures["faults"]) for name, figures in by_name.items()}
            ratio = min(median[name] for name in STOCK_DDP if name in median) / median["hpcomm"]
            cells = [f"{median[name] / MILLISECOND:.1f} ({faults[name]:,.0f})" for name in names]
            body.append([model, malloc, *cells, times(ratio)])
            least = DDP_AIMS.get((document["arguments"]["ranks"], model))
            if least is not None:
                what = f"DDP step of {model}, alone in its processes, malloc {malloc}, against the faster stock variant"
                aims.append(Aim(what, times(least), times(ratio), ratio >= least))
    return Section(rows(["ms a step (page faults)", "malloc", *names, "faster stock / hpcomm"], body), aims, [])


def ddp_parameters(document: Document) -> Section:
    """benchmarks.ddp --parameters: what a step takes above computation alone, by number of parameters."""
    by_variant: Mapping[str, Mapping[str, Samples]] = document["parameters"]
    bare = by_variant[COMPUTE]
    body = [
        [name, *(f"{statistics.median(a - b for a, b in zip(s, bare[count], strict=True)) / int(count) * 1e6:.2f}"
                 for count, s in counts.items())]
        for name, counts in by_variant.items() if name != COMPUTE
    ]  # fmt: skip
    return Section(rows(["us a parameter above computation alone", *(f"{n} parameters" for n in bare)], body), [], [])


def ddp_hooks(document: Document) -> Section:
    """benchmarks.ddp --hooks: CPU time of the thread of the backward."""
    body, aims = [], []
    for count, costs in document["hooks"].items():
        for name, kinds in costs.items():
            body.append([count, name, *(f"{seconds * 1e6:.2f}" for seconds in kinds.values())])
        seconds = costs["hpcomm"]["reduce"]
        aims.append(Aim(f"a hook, with {count} parameters", "under 1 us", f"{seconds * 1e6:.2f} us", seconds < 1e-6))
    return Section(rows(["parameters", "us a hook", "no_sync()", "with reduction", "+ 64 bytes"], body), aims, [])


def messages(document: Document) -> Section:
    """benchmarks.p2p: one message from rank to rank."""
    peers, body, aims, lines = document["arguments"]["peers"], [], [], []
    shared = document["environment"]["transport"] == "shm"
    for row in document["rows"]:
        samples = row["seconds"]
        median = {name: statistics.median(s) for name, s in samples.items()}
        stock = [name for name in STOCK_MESSAGES if name in samples]
        best = min(stock, key=median.__getitem__) if stock else None
        ratio = by_rounds(samples[best], samples["channel"]) if best else None
        body.append([row["case"], *(span(median[name]) if name in median else "" for name in peers),
                     times(ratio) if ratio else ""])  # fmt: skip
        if best is None or ratio is None:
            continue
        what = f"message of {row['case']}" + ("" if shared else " over gloo")
        lines.append(Line(what, median[best], median["channel"], ratio))
        least = {"32 x 16 KB": 10.0, "1 x 25 MB": 5.0}.get(row["case"]) if shared else 1.0
        if least:
            aims.append(Aim(f"{what}, against the best stock way", times(least), times(ratio), ratio >= least))
        if row["case"] == "1 x 25 MB" and "mpich" in samples:
            ratio = by_rounds(samples["mpich"], samples["channel"])
            aims.append(Aim(f"{what}, against MPICH", "1.00x", times(ratio), ratio >= 1))
        if row["case"] == "1 x 4 B" and shared:
            there_and_back = 2 * median["channel"]  # a time is half a round trip
            aims.append(Aim("round trip of 4 B by a Channel", "under 5 us", span(there_and_back),
                            there_and_back < 5e-6))  # fmt: skip
    return Section(rows(["", *peers, "best stock way / channel"], body), aims, lines)


def headers(document: Document) -> Section:
    """benchmarks.p2p --headers: what a header costs, and a schema that is always another."""
    body, aims = [], []
    for row in document["rows"]:
        schema = max(0.0, statistics.median(row["new_schema"]))
        told = ""  # what is longer has a header on a frozen edge, too
        if "header" in row:
            header = max(0.0, statistics.median(row["header"]))
            told, both = span(header), "under 4 us (2 us a side)"
            aims.append(Aim(f"header of {row['case']}, both sides", both, told, header < 4e-6))
        body.append([row["case"], told, span(schema)])
        aims.append(Aim(f"another schema of {row['case']}", "under 20 us", span(schema), schema < 20e-6))
    return Section(rows(["", "a header, both sides", "another schema, beyond that"], body), aims, [])


def tune(document: Document) -> Section:
    """benchmarks.p2p --tune: 8 tensors of a size, packed and as they are; the default packs those below DIRECT_FROM."""
    transport = document["environment"]["transport"]
    body, losses = [], []
    for row in document["rows"]:
        packed, direct = row["seconds"]["packed"], row["seconds"]["as they are"]
        ratio = by_rounds(direct, packed)
        body.append([f"8 x {size(row['bytes'])}", span(statistics.median(packed)), span(statistics.median(direct)),
                     f"{ratio:.2f}"])  # fmt: skip
        losses.append((1 / ratio if row["bytes"] < DIRECT_FROM[transport] else ratio, row["bytes"]))
    worst, at = max(losses)
    over = {"shm": "shared memory", "c10d": "gloo"}[transport]
    aim = Aim(f"the default way of 8 tensors of a size, over {over}", "at most 1.15 times as long as the other",
              f"{worst:.2f} at worst ({size(at)})", worst <= 1.15)  # fmt: skip
    return Section(rows(["", "packed", "as they are", "as they are / packed"], body), [aim], [])


def _share(row: Mapping[str, Any], name: str) -> str:
    """The median, and the quartiles where the results have them: older ones do not."""
    text = f"{row['shares'][name]:.0%}"
    if name not in row.get("quartiles", {}):
        return text
    low, high = row["quartiles"][name]
    return f"{text} ({low:.0%}-{high:.0%})"


def pack(document: Document) -> Section:
    """benchmarks.pack: shares of the copy rate."""
    body, aims = [], []
    for row in document["rows"]:
        shares = row["shares"]
        body.append([row["case"], *(_share(row, name) for name in shares if name != "copy")])
        aims += [Aim(f"{way} {row['case']}", "80% of the copy rate", f"{shares[way]:.0%}", shares[way] >= 0.8)
                 for way in ("pack", "unpack")]  # fmt: skip
    names = [name for name in document["rows"][0]["shares"] if name != "copy"]
    return Section(rows(["share of the copy rate", *names], body), aims, [])


def pipeline(document: Document) -> Section:
    """benchmarks.pipeline: steps, the bound of the computation and the simulation, against torch's pipelining."""
    body, lines = [], []
    arguments, ranks = document["arguments"], document["environment"]["ranks"]
    dp, m = arguments["dp"], arguments["microbatches"]
    stretch = (m + ranks // dp - 1) / m
    for name, result in document["results"].items():
        if "seconds" not in result:
            continue
        samples = result["seconds"]
        median = {variant: statistics.median(s) for variant, s in samples.items()}
        halved = "hpcomm.Pipeline, wire_dtype=bfloat16"
        ours = min((v for v in median if v.startswith("hpcomm") and v != halved), key=median.__getitem__)
        stock = samples.get("torch pipelining, gloo")
        ratio = by_rounds(stock, samples[ours]) if stock else None
        predicted = result["predicted"]
        body.append([
            name,
            *(f"{median[variant] / MILLISECOND:.1f}" if variant in median else ""
              for variant in ("torch pipelining, gloo", "torch pipelining, hpcomm")),
            f"{median[ours] / MILLISECOND:.1f}",
            *([f"{median[halved] / MILLISECOND:.1f}"] if halved in median else []),
            f"{median[COMPUTE] * stretch / MILLISECOND:.1f}",
            f"{statistics.median(predicted) / MILLISECOND:.1f}",
            f"{by_rounds(samples[ours], predicted):.2f}",
            times(ratio) if ratio else "",
        ])  # fmt: skip
        if stock and ratio:
            mesh = f"dp={dp} x pp={ranks // dp}" if dp > 1 else f"{ranks} ranks"
            if link := arguments.get("link"):  # the first results have none
                mesh += f" on {arguments['hosts']} hosts, {link}"
            lines.append(Line(f"Pipeline step, {name}, {mesh}", statistics.median(stock), median[ours], ratio))
            if halved in samples:
                ratio = by_rounds(stock, samples[halved])
                where = f"{mesh}, messages in 16 bits"
                lines.append(Line(f"Pipeline step, {name}, {where}", statistics.median(stock), median[halved], ratio))
    head = ["ms a step", "torch pipelining, gloo", "torch pipelining, hpcomm", "hpcomm.Pipeline",
            *(["wire_dtype=bfloat16"] if arguments.get("hosts", 1) > 1 else []), "bound of 1F1B",
            "simulated", "measured / simulated", "torch on gloo / hpcomm.Pipeline"]  # fmt: skip
    return Section(rows(head, body), [], lines)
