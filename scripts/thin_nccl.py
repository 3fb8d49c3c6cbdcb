"""Makes a libnccl.so.2 small enough to be carried to a machine with one kind of GPU: only that GPU's code stays.

    python3 scripts/thin_nccl.py nvidia/nccl/lib/libnccl.so.2 libnccl.so.2.xz [--arch 90]
    xz -dk libnccl.so.2.xz          # there; or python3 -m lzma ... ; then GPU_NCCL=$PWD/libnccl.so.2

Nothing is moved: the machine code of other GPUs and the debug information become zeros, which compress to nothing.
NCCL 2.30.7 of PyPI goes from 252 MB to some 30 MB. Headers of the fat binaries stay, so the driver finds what it looks
for; on another GPU NCCL would fail to load its kernels.
"""

from __future__ import annotations

import argparse
import lzma
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

FAT_MAGIC = 0xBA55ED50
FAT_SECTIONS = (".nv_fatbin", "__nv_relfatbin")


def sections(data: bytearray) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each section of a 64-bit little-endian ELF file, by name."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise SystemExit("thin_nccl: this is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    found = {}
    for header in headers:
        start = headers[names][4] + header[0]
        name = data[start : data.index(b"\0", start)].decode()
        found[name] = (header[4], header[5] if header[1] != 8 else 0)  # 8: no bytes in the file
    return found


def entries(data: bytearray, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """(kind, architecture, offset, bytes) of what the fat binaries of a section hold; kind 2 is machine code."""
    at, end = start, start + size
    while at + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != FAT_MAGIC:  # padding between them
            at += 8
            continue
        entry, stop = at + header, at + header + length
        while entry < stop:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            yield kind, arch, entry + entry_header, payload
            entry += entry_header + payload
        at = stop


def thin(data: bytearray, arch: int) -> tuple[int, int]:
    """Zeroes in place; (bytes that stay of the code, bytes that went)."""
    kept = gone = 0
    found = sections(data)
    for name in FAT_SECTIONS:
        for kind, of, start, size in entries(data, *found.get(name, (0, 0))):
            if kind == 2 and of == arch:
                kept += size
            else:
                data[start : start + size] = bytes(size)
                gone += size
    if kept == 0:
        raise SystemExit(f"thin_nccl: there is no code for sm_{arch} in it")
    for name, (start, size) in found.items():
        if name.startswith(".debug_") or name in (".symtab", ".strtab"):
            data[start : start + size] = bytes(size)
            gone += size
    return kept, gone


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path, help="compressed when its name ends in .xz")
    parser.add_argument("--arch", type=int, default=90, help="90 for H100 and H200 (90)")
    arguments = parser.parse_args()
    data = bytearray(arguments.library.read_bytes())
    kept, gone = thin(data, arguments.arch)
    if arguments.out.suffix == ".xz":
        arguments.out.write_bytes(lzma.compress(data, preset=2))
    else:
        arguments.out.write_bytes(data)
    print(
        f"{arguments.out}: {arguments.out.stat().st_size >> 20} MiB; {kept >> 20} MiB of code for sm_{arguments.arch} "
        f"stayed, {gone >> 20} MiB went"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
