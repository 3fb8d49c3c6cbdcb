"""Builds hpcomm's native module with CMake and Ninja against the torch that is installed.

Environment: USE_CUDA=auto|0|1, MAX_JOBS, CXX, CXXFLAGS, CMAKE_ARGS, HPCOMM_BUILD_DIR.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.dist_info import dist_info

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parent

NO_TORCH = """
hpcomm is compiled against the torch that it will run with, and there is no torch in this build environment.
pip builds in an isolated environment unless told otherwise. Install torch first, then:

    pip install --no-build-isolation .
"""


def import_torch() -> ModuleType:
    """The torch to build against, or an explanation."""
    # The build has no use for numpy, and torch warns at length when it is not there.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"{NO_TORCH}\n({type(error).__name__}: {error})") from None
    return torch


class DistInfo(dist_info):
    """Metadata, the first thing that pip asks for: the place to stop before it downloads dependencies."""

    def run(self) -> None:
        import_torch()
        super().run()


class BuildPy(build_py):
    """Starts from an empty folder: modules that were deleted since the last build must not be in the wheel."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "hpcomm", ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """`build_ext` that leaves compiling to CMake; the build folder is kept, so a second build is incremental."""

    def run(self) -> None:
        torch = import_torch()
        self.build_dir = build_dir(torch.__version__)
        super().run()
        package = ROOT / "hpcomm" if self.inplace else Path(self.build_lib) / "hpcomm"
        write_build_info(package / "_build.py", torch, self.build_dir)

    def build_extension(self, ext: Extension) -> None:
        in_place = bool(self.inplace) or self.editable_mode
        configure(self.build_dir, editable=in_place)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        call(["cmake", "--build", str(self.build_dir), "--parallel", jobs])
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: a process that has the old module mapped keeps it.
        staged = target.with_suffix(".new")
        shutil.copy2(self.build_dir / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", staged)
        staged.replace(target)


def build_dir(torch_version: str) -> Path:
    """One folder per Python and torch, so that changing them never mixes objects."""
    chosen = os.environ.get("HPCOMM_BUILD_DIR")
    return ROOT / (chosen or f"build/{sys.implementation.cache_tag}-torch-{torch_version}")


def use_cuda() -> bool:
    """USE_CUDA=auto|0|1. There are no CUDA sources yet: auto is CPU, 1 is refused by CMake in plain words."""
    choice = os.environ.get("USE_CUDA", "auto").lower() or "auto"
    if choice not in {"auto", "0", "1", "off", "on"}:
        raise SystemExit(f"USE_CUDA={choice}: use auto, 0 or 1.")
    return choice in {"1", "on"}


def configure(folder: Path, *, editable: bool) -> None:
    """Runs CMake's configuration, which is cheap when nothing changed."""
    import torch
    from torch.utils import cpp_extension

    libraries = cpp_extension.library_paths()
    settings = {
        "HPCOMM_USE_CUDA": "ON" if use_cuda() else "OFF",
        "HPCOMM_TORCH_INCLUDE_DIRS": ";".join(cpp_extension.include_paths()),
        "HPCOMM_TORCH_LIBRARY_DIRS": ";".join(libraries),
        "HPCOMM_TORCH_CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
        "HPCOMM_PYTHON_INCLUDE_DIR": sysconfig.get_path("include"),
        "HPCOMM_MODULE_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "HPCOMM_EXTRA_RPATH": ";".join(libraries) if editable else "",
    }
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    if compiler_changed(folder):
        command.append("--fresh")
    command += [f"-D{name}={value}" for name, value in settings.items()]
    call(command + shlex.split(os.environ.get("CMAKE_ARGS", "")))


def compiler_changed(folder: Path) -> bool:
    """CMake looks at CXX and CXXFLAGS in its first run only."""
    marker = folder / "compiler.txt"
    now = f"{os.environ.get('CXX', '')}\n{os.environ.get('CXXFLAGS', '')}\n"
    changed = marker.exists() and marker.read_text() != now
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(now)
    return changed


def write_build_info(path: Path, torch: ModuleType, folder: Path) -> None:
    """hpcomm/_build.py: what hpcomm/_native.py compares before it loads the module."""
    values = {
        "TORCH_VERSION": str(torch.__version__),
        "TORCH_CUDA": str(torch.version.cuda or ""),
        "PYTHON": str(sys.implementation.cache_tag),
        "USE_CUDA": use_cuda(),
        "CXX": compiler_version(folder),
        "REVISION": output(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]),
    }
    lines = ['"""What this copy of hpcomm was built with. Written by setup.py; not in version control."""', ""]
    lines += [f"{name} = {json.dumps(value) if isinstance(value, str) else value}" for name, value in values.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def compiler_version(folder: Path) -> str:
    """First line of the compiler's --version."""
    cache = (folder / "CMakeCache.txt").read_text().splitlines()
    compiler = next(line.split("=", 1)[1] for line in cache if line.startswith("CMAKE_CXX_COMPILER:"))
    return output([compiler, "--version"]).splitlines()[0]


def output(command: list[str]) -> str:
    """What a command prints, empty when it fails: a source archive has no revision."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def call(command: list[str]) -> None:
    """Runs a build step; its own output says what went wrong, so no traceback on top."""
    # cmake and ninja of this environment, also when it is not activated.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    program = shutil.which(command[0], path=path) or command[0]
    try:
        subprocess.run([program, *command[1:]], check=True, env={**os.environ, "PATH": path})
    except FileNotFoundError:
        raise SystemExit(f"hpcomm: {command[0]} not found. Install it: pip install cmake ninja") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"hpcomm: {shlex.join(command[:3])} ... failed with {error.returncode}, see above.") from None


setup(
    ext_modules=[Extension("hpcomm._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy, "dist_info": DistInfo},
)
