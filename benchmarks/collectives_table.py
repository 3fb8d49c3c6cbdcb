"""What benchmarks.collectives prints: rows like nccl-tests' with a group of columns per peer, and the summary.

A row is a plain dict, as it stands in the JSON; ``timed_row`` makes it from the samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.operations import Case

COPY = "copy"  # the name of the memory copy among the samples
_LEFT = f"{'size':>12} {'count':>12} {'type':>9} {'redop':>6} {'root':>5}"
_UNITS = f"{'(B)':>12} {'(elements)':>12} {'':>9} {'':>6} {'':>5}"
_GROUP = f"{'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>7}"
_GROUP_UNITS = f"{'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>7}"


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The middle half of ``values``, both ends included in the reckoning."""
    if len(values) == 1:
        return {"low": values[0], "median": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def timed_row(
    case: Case,
    dtype: str,
    samples: Mapping[str, Sequence[float]],
    iterations: Mapping[str, Sequence[int]],
    wrong: Mapping[str, int] | None,
    baseline: str,
) -> dict[str, Any]:
    """One line of the table from seconds per operation, by peer and round.

    Args:
        dtype: nccl-tests' name of the data type.
        samples: of the peers and, for sizes that have one, of a memory copy of ``size`` bytes.
        wrong: elements; None if nothing was checked.
    """
    peers: dict[str, Any] = {}
    for name, seconds in samples.items():
        if name == COPY:
            continue
        time = quartiles([1e6 * s for s in seconds])
        algbw = case.size / time["median"] / 1e3
        peers[name] = {
            "time_us": time,
            "samples_us": [1e6 * s for s in seconds],
            "iterations": list(iterations[name]),
            "algbw_gbs": algbw,
            "busbw_gbs": algbw * case.operation.bus_factor(case.ranks),
            "wrong": None if wrong is None else wrong[name],
        }
    row: dict[str, Any] = {
        "operation": case.operation.name,
        "ranks": case.ranks,
        "size": case.size,
        "count": case.count,
        "type": dtype,
        "redop": case.redop if case.operation.reduces else "none",
        "root": case.root if case.operation.rooted else -1,
        "peers": peers,
        # Of times of the same round: what slowed the machine down for both cancels.
        "ratios": {
            name: quartiles([theirs / ours for theirs, ours in zip(samples[name], samples[baseline], strict=True)])
            for name in peers
            if name != baseline and baseline in samples
        },
    }
    least = case.limit_bytes()
    if COPY in samples and least is not None:
        copy = quartiles([1e6 * s for s in samples[COPY]])
        limit = copy["median"] * least / (2 * case.size)
        row["copy_us"] = copy
        row["limit_bytes"] = least
        row["limit_us"] = limit
        row["share_of_limit"] = {name: limit / peer["time_us"]["median"] for name, peer in peers.items()}
    return row


def header(peers: Sequence[str], baseline: str) -> str:
    """The lines above the rows of one operation."""
    others = [name for name in peers if name != baseline] if baseline in peers else []
    groups = "  ".join(f"{name:^{len(_GROUP)}}" for name in peers)
    ratios = "".join(f" {name:>12}" for name in others)
    blank = " " * len(_LEFT)
    lines = [
        f"{blank}  {groups}  {'time, as multiples of ' + baseline if others else ''}".rstrip(),
        f"{_LEFT}  {'  '.join([_GROUP] * len(peers))} {ratios}".rstrip(),
        f"{_UNITS}  {'  '.join([_GROUP_UNITS] * len(peers))}".rstrip(),
    ]
    return "\n".join(f"#{line}" for line in lines)


def line(row: Mapping[str, Any]) -> str:
    """One row."""
    left = f"{row['size']:>12} {row['count']:>12} {row['type']:>9} {row['redop']:>6} {row['root']:>5}"
    groups = []
    for peer in row["peers"].values():
        wrong = "N/A" if peer["wrong"] is None else str(peer["wrong"])
        time = _significant(peer["time_us"]["median"])
        groups.append(f"{time:>9} {peer['algbw_gbs']:>7.2f} {peer['busbw_gbs']:>7.2f} {wrong:>7}")
    ratios = "".join(f" {_ratio(ratio['median']):>12}" for ratio in row["ratios"].values())
    return f" {left}  {'  '.join(groups)} {ratios}".rstrip()


def summary(rows: Sequence[Mapping[str, Any]], baseline: str) -> str:
    """Ratios with quartiles of all rows, then the distance to the memory's limit where it was measured."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    lines = [
        f"# time of each peer as a multiple of {baseline}'s, median [quartiles] of the rounds; above 1 it is slower"
    ]
    others = [name for name in names if name != baseline]
    lines.append(
        f"#{'operation':>15} {'ranks':>5} {'size':>12} {baseline + ' us':>16}" + "".join(f" {n:>24}" for n in others)
    )
    for row in rows:
        cells = "".join(f" {_spread(row['ratios'].get(name)):>24}" for name in others)
        ours = row["peers"].get(baseline)
        shown = _significant(ours["time_us"]["median"]) if ours else "-"
        lines.append(f" {row['operation']:>15} {row['ranks']:>5} {row['size']:>12} {shown:>16}{cells}")
    limited = [row for row in rows if "limit_us" in row]
    if limited:
        lines += [
            "",
            "# the memory's limit: the time in which a rank could read and write what a perfect algorithm must, at the",
            "# rate of a copy of the same size by all ranks at once, timed in turn with the peers; then which share of",
            "# its own time each peer would need at that rate",
            f"#{'operation':>15} {'ranks':>5} {'size':>12} {'bytes per rank':>15} {'limit us':>10} {'copy GB/s':>10}"
            + "".join(f" {name:>12}" for name in names),
        ]
        for row in limited:
            rate = 2 * row["size"] / row["copy_us"]["median"] / 1e3
            shares = "".join(
                f" {format(row['share_of_limit'][name], '.0%') if name in row['share_of_limit'] else '-':>12}"
                for name in names
            )
            lines.append(
                f" {row['operation']:>15} {row['ranks']:>5} {row['size']:>12} {row['limit_bytes']:>15.0f}"
                f" {_significant(row['limit_us']):>10} {rate:>10.2f}{shares}"
            )
    return "\n".join(lines)


def waits(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of ``--wait``."""
    lines = [
        "# CPU time of a rank that waits in a barrier for a late one, as a share of that wait (all its threads)",
        f"#{'peer':>15} {'ranks':>5} {'late by (s)':>12} {'median':>8} {'quartiles':>15} {'largest':>8}",
    ]
    for row in rows:
        cpu = row["cpu"]
        between = f"{cpu['low']:.1%}-{cpu['high']:.1%}"
        lines.append(
            f" {row['peer']:>15} {row['ranks']:>5} {row['late_s']:>12.2f} {cpu['median']:>8.1%} {between:>15}"
            f" {row['largest']:>8.1%}"
        )
    return "\n".join(lines)


def _significant(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _ratio(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _spread(ratio: Mapping[str, float] | None) -> str:
    return f"{_ratio(ratio['median'])} [{_ratio(ratio['low'])}-{_ratio(ratio['high'])}]" if ratio else "-"
