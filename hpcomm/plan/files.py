"""Files of the plan tools: whatever goes wrong with one is said under its name, and JSON says nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from hpcomm.errors import InvalidArgument


def read_text(path: str | PathLike[str]) -> str:
    """The text of a file, which is UTF-8 whatever the locale, with a byte order mark or without."""
    with _named(path):
        return Path(path).read_text(encoding="utf-8-sig")


def write_text(path: str | PathLike[str], text: str) -> None:
    """Writes a file, likewise."""
    with _named(path):
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _named(path: str | PathLike[str]) -> Iterator[None]:
    # Python names the file when opening it fails, but not when the disk is full.
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def say(text: str) -> None:
    """A line on stderr, which may be closed, or full: what was done, or the exit status, stays as it is."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def read_json(path: str | PathLike[str], what: str) -> Any:
    """:func:`parse_json` of a file.

    Raises:
        InvalidArgument: it holds no such text, or no text at all.
        OSError: it cannot be read.
    """
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"not {what}: not JSON ({error})") from None
    return parse_json(text, what)


def parse_json(text: str, what: str) -> Any:
    """The value of JSON text in which no object has a key twice: Python would take the last one and say nothing.

    Raises:
        InvalidArgument: it is no such text, hence not ``what``, such as "a cost model".
    """

    def only_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InvalidArgument(f"not {what}: {twice!r:.40} stands twice in one object, beside {found!r:.60}")
        return found

    try:
        return json.loads(text, object_pairs_hook=only_once)
    except InvalidArgument:
        raise
    except RecursionError:
        raise InvalidArgument(f"not {what}: nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(f"not {what}: not JSON ({error})") from None
