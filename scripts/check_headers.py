"""Does what hpcomm derives from classes of torch still compile against another version's headers?

    python scripts/check_headers.py build/torch-2.13.0 2.14.1

c10d's classes change between minor versions of torch; a virtual function that is gone is an error only in a build for
that version. This reads the commands of a build (compile_commands.json), and gives the sources that see c10d to the
compiler once more, with the headers out of that version's wheel (hundreds of megabytes are downloaded once, what is not
a header is dropped) and for their syntax alone. It does not link or run anything: ``make compat`` does. PIP_ARGS goes
to pip; where its index does not have that version, this says so and is no failure.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
INCLUDE = re.compile(r'^#include (?:"(?P<own>[^"]+)"|<(?P<other>[^>]+)>)', re.MULTILINE)
C10D = "torch/csrc/distributed/"
NOT_THERE = "No matching distribution found for torch=="


def headers(version: str) -> Path:
    """The include directory of a torch, fetched at first."""
    place = ROOT / "build/headers" / version
    if not place.exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            options = shlex.split(os.environ.get("PIP_ARGS", ""))
            done = subprocess.run(
                [*pip, *options, "--dest", folder, f"torch=={version}"], stderr=subprocess.PIPE, text=True, check=False
            )
            if NOT_THERE in done.stderr:
                print(f"*** SKIPPED: the package index has no torch {version}. Its headers were NOT tried. ***")
                sys.exit(0)
            if done.returncode:
                sys.exit(f"check_headers: pip could not fetch torch {version}:\n{done.stderr}")
            (wheel,) = Path(folder).glob("torch-*.whl")
            partial = place.with_suffix(".partial")
            with zipfile.ZipFile(wheel) as file:
                file.extractall(partial, [name for name in file.namelist() if name.startswith("torch/include/")])
            partial.rename(place)
    return place / "torch/include"


@functools.cache
def sees_c10d(source: Path) -> bool:
    """Directly, or through headers of ours."""
    for found in INCLUDE.finditer(source.read_text()):
        own = SOURCES / (found["own"] or "")
        if (found["other"] or "").startswith(C10D) or (own.is_file() and sees_c10d(own)):
            return True
    return False


def complaint(entry: dict[str, str], include: Path) -> str:
    """What the compiler says of a source with these headers; nothing if it takes them."""
    words = shlex.split(entry["command"])
    for option in ("-include", "-o"):  # the precompiled header is of the other version
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    words = [re.sub(r"^/\S+/torch/include", str(include), word) for word in words]
    done = subprocess.run(
        [*words, "-fsyntax-only", "-w"], cwd=entry["directory"], capture_output=True, text=True, check=False
    )
    return f"{entry['file']}:\n{done.stderr}" if done.returncode else ""


def main() -> None:
    """All sources that see c10d, one on each core."""
    build, version = Path(sys.argv[1]), sys.argv[2]
    include = headers(version)
    entries = json.loads((build / "compile_commands.json").read_text())
    by_file = {Path(entry["file"]): entry for entry in entries}
    chosen = [entry for file, entry in by_file.items() if file.is_relative_to(SOURCES) and sees_c10d(file)]
    if not chosen:
        sys.exit(f"check_headers: {build} compiles nothing that sees c10d")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        complaints = list(filter(None, pool.map(lambda entry: complaint(entry, include), chosen)))
    print("\n".join(complaints), end="")
    passed = len(chosen) - len(complaints)
    print(f"{passed} of {len(chosen)} sources that see c10d compile with torch {version}'s headers")
    sys.exit(bool(complaints))


main()
