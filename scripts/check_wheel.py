"""Looks into a wheel of hpcomm before it leaves the house: name, size, libraries, search paths, traces of the build.

    python scripts/check_wheel.py dist/hpcomm-*.whl

A wheel brings nothing of torch, CUDA or NCCL along: it finds them where it is installed. Prints what it found; exits
with 1 and every complaint when something is not as it should be.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 20 << 20

TORCH = {"libtorch_python.so", "libtorch.so", "libtorch_cpu.so", "libc10.so"}
CUDA = {"libtorch_cuda.so", "libc10_cuda.so", "libcudart.so"}  # without the version behind .so
SYSTEM = {
    "libc.so",
    "libm.so",
    "libstdc++.so",
    "libgcc_s.so",
    "libpthread.so",
    "libdl.so",
    "librt.so",
    "ld-linux-x86-64.so",
}
FILES = re.compile(r"hpcomm/([\w/]+\.pyi?|py\.typed|_C\.[\w-]+\.so)|hpcomm-[^/]+\.dist-info/\w[\w./-]*")


def needed(dynamic: str) -> list[str]:
    """The libraries that `readelf -d` names."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def search_paths(dynamic: str) -> list[str]:
    """RPATH and RUNPATH."""
    return [part for found in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) for part in found.split(":")]


def wrong_libraries(libraries: list[str], *, cuda: bool) -> list[str]:
    """Libraries that a wheel of this kind must not need, and those that it must."""
    plain = {re.sub(r"\.so[.\d]*$", ".so", name): name for name in libraries}
    allowed = TORCH | SYSTEM | (CUDA if cuda else set())
    complaints = [f"needs {name}, which is not on the list" for short, name in plain.items() if short not in allowed]
    wanted = {"libtorch_cpu.so", *({"libcudart.so"} if cuda else set())}
    return complaints + [f"does not need {name}" for name in sorted(wanted - plain.keys())]


def wrong_paths(paths: list[str]) -> list[str]:
    """Search paths that mean something on one machine only."""
    return [f"searches {path}, not relative to itself" for path in paths if not path.startswith("$ORIGIN")]


def newest_symbols(versions: str) -> dict[str, str]:
    """{"GLIBC": "2.34", ...}: the newest version of each that `readelf -V` shows as needed."""
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", versions):
        newest[name] = max(newest.get(name, ()), tuple(int(part) for part in version.split(".")))
    return {name: ".".join(map(str, version)) for name, version in sorted(newest.items())}


def traces(data: bytes, folders: list[str]) -> list[str]:
    """Which of the folders stand in the bytes."""
    return [folder for folder in folders if folder.encode() in data]


def build_folders() -> list[str]:
    """Folders of this machine that nobody else has: the source tree, and the environment that builds."""
    found = {str(ROOT), sys.prefix, str(Path(sys.prefix).resolve()), str(Path.home())}
    return sorted(folder for folder in found if len(Path(folder).parts) > 1 and folder not in {"/usr", "/usr/local"})


def wrong_name(name: str, tag: str) -> list[str]:
    """The file name says version, kind of build, torch, Python and platform."""
    local = r"(cpu|cu\d+)\.torch\d+\.\d+"
    if re.fullmatch(rf"hpcomm-[\w.]+\+{local}-{re.escape(tag)}\.whl", name):
        return []
    return [f"is called {name}; expected hpcomm-VERSION+(cpu|cuNNN).torchN.M-{tag}.whl"]


def tag_here() -> str:
    """cp311-cp311-linux_x86_64"""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def readelf(option: str, path: Path) -> str:
    """What binutils say, in English."""
    command = ["readelf", "--wide", option, str(path)]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    ).stdout


def check(wheel: Path) -> list[str]:
    """All complaints about a wheel."""
    complaints = wrong_name(wheel.name, tag_here())
    cuda = "+cu" in wheel.name
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        complaints.append(f"has {size >> 20} MiB, more than {MAX_BYTES >> 20}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        complaints += [f"contains {name}" for name in names if not FILES.fullmatch(name)]
        for name in names:
            complaints += [f"{name} names {found}" for found in traces(archive.read(name), build_folders())]
        modules = [name for name in names if name.endswith(".so")]
        if len(modules) != 1:
            return [*complaints, f"has {len(modules)} native modules, expected one"]
        module = Path(archive.extract(modules[0], folder))
        dynamic = readelf("-d", module)
        complaints += wrong_libraries(needed(dynamic), cuda=cuda) + wrong_paths(search_paths(dynamic))
        print(f"{wheel.name}: {size / 2**20:.1f} MiB, {modules[0]} {module.stat().st_size / 2**20:.1f} MiB")
        print(f"  needs     {' '.join(needed(dynamic))}")
        print(f"  looks in  {' '.join(search_paths(dynamic))}")
        symbols = newest_symbols(readelf("-V", module))
        print(f"  symbols   {' '.join(f'{name} {version}' for name, version in symbols.items())}")
    return complaints


def main() -> None:
    """Checks the wheels that the command line names."""
    failed = False
    for name in sys.argv[1:]:
        for complaint in check(Path(name)):
            print(f"{Path(name).name} {complaint}", file=sys.stderr)
            failed = True
    sys.exit(1 if failed or not sys.argv[1:] else 0)


if __name__ == "__main__":
    main()
