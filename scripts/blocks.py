"""Blocks of a Markdown file that a script writes: they stand between two comments that name them."""

from __future__ import annotations


def replaced(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between the two comments of ``name``.

    Raises:
        ValueError: a comment is missing, or there more than once.
    """
    begin, end = f"<!-- {name}: written by scripts/", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"there have to be {begin!r} and {end!r}, once each")
    before, rest = text.split(begin)
    comment, after = rest.split(end)
    first = comment.split("-->")[0]
    return f"{before}{begin}{first}-->\n\n{block}\n\n{end}{after}"
