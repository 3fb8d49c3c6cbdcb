"""scripts/thin_nccl.py: the code of other GPUs and the debug information go, every other byte stays where it is."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.append(str(SCRIPTS))

import thin_nccl  # noqa: E402

PTX, CODE = 1, 2


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """(kind, architecture, payload) of each entry."""
    body = b""
    for kind, arch, payload in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", arch)
        body += header.ljust(64, b"\x07") + payload
    return struct.pack("<IHHQ", thin_nccl.FAT_MAGIC, 1, 16, len(body)) + body


def library(**contents: bytes) -> bytearray:
    """An ELF file with these sections; "__" for a dot."""
    named = {name.replace("__", "."): content for name, content in contents.items()}
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*named, ".shstrtab"))
    data, headers, at = b"", [bytes(64)], 1
    for name, content in {**named, ".shstrtab": names}.items():
        headers.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(data), len(content), 0, 0, 1, 0))
        data += content
        at += len(name) + 1
    start = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", 64 + len(data))
    start = start.ljust(58, b"\0") + struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return bytearray(start + data + b"".join(headers))


def test_only_the_code_of_one_gpu_stays() -> None:
    mine, theirs, ptx = b"mine" * 9, b"theirs" * 9, b"ptx" * 9
    fat = fat_binary((CODE, 80, theirs), (CODE, 90, mine), (PTX, 90, ptx)) + bytes(8) + fat_binary((CODE, 90, mine))
    before = library(__text=b"host code", __nv_fatbin=fat, __debug_info=b"debug", __data=b"values")
    after = bytearray(before)
    kept, gone = thin_nccl.thin(after, 90)
    assert kept == 2 * len(mine)
    assert gone == len(theirs) + len(ptx) + len(b"debug")
    expected = bytes(before)
    for word in (theirs, ptx, b"debug"):
        expected = expected.replace(word, bytes(len(word)), 1)
    # The names of the sections, ".debug_info" among them, are behind what was replaced.
    assert bytes(after) == expected


def test_what_has_no_code_for_the_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match="no code for sm_100"):
        thin_nccl.thin(library(__nv_fatbin=fat_binary((CODE, 90, b"mine"))), 100)
    with pytest.raises(SystemExit, match="no 64-bit ELF"):
        thin_nccl.thin(bytearray(b"MZ"), 90)
