"""One line of what the doctor says, and how it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__: list[str] = []

OK, NOTE, FAIL = "ok", "note", "FAIL"


class Finding(NamedTuple):
    """One line: ``mark`` is ok; note, which stands in nobody's way; or FAIL."""

    mark: str
    subject: str
    text: str


def show(title: str, findings: Iterable[Finding]) -> None:
    """Prints them under ``title``."""
    lines = [title]
    for mark, subject, text in findings:
        first, *rest = text.splitlines()
        lines.append(f"  {mark:<5} {subject:<15} {first}")
        lines += [f"{'':<24}{line}".rstrip() for line in rest]
    print("\n".join(lines), flush=True)


def words_of(ranks: Sequence[int]) -> str:
    """Such as "ranks 0-3, 6"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
