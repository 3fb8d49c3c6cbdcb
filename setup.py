"""Builds hpcomm's native module with CMake and Ninja against the torch that is installed.

Environment: USE_CUDA=auto|0|1, TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS, CXX, CXXFLAGS, CMAKE_ARGS, HPCOMM_BUILD_DIR.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
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

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import cuda_choice  # noqa: E402

if TYPE_CHECKING:
    from types import ModuleType

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
        if not cuda().on:
            print(f"hpcomm: building without CUDA ({cuda().why_not})", flush=True)
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


@functools.cache
def cuda() -> cuda_choice.Choice:
    """USE_CUDA=auto|0|1, decided from what is installed."""
    torch = import_torch()
    found = cuda_choice.Found(
        torch=str(torch.__version__), torch_cuda=torch.version.cuda or "", nvcc=nvcc(), nvcc_release=nvcc_release()
    )
    return cuda_choice.choose(cuda_choice.read_wish(os.environ.get("USE_CUDA", "")), found)


@functools.cache
def nvcc() -> str:
    """Path of the CUDA compiler, empty when there is none."""
    return cuda_choice.find_nvcc(os.environ)


@functools.cache
def nvcc_release() -> str:
    """Its version, "13.0"; empty without nvcc."""
    return cuda_choice.nvcc_release(output([nvcc(), "--version"])) if nvcc() else ""


@functools.cache
def architectures() -> str:
    """CMAKE_CUDA_ARCHITECTURES, empty in builds without CUDA."""
    if not cuda().on:
        return ""
    known = cuda_choice.known_to(output([nvcc(), "--list-gpu-arch"]))
    return cuda_choice.architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), known)


def cuda_settings() -> dict[str, str]:
    """What CMake is told about CUDA."""
    if not cuda().on:
        return {"HPCOMM_USE_CUDA": "OFF"}
    # Namespace package of NVIDIA's wheels: cu13/ for CUDA 13, a folder for each library before.
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations or []) if wheels else []
    headers = sorted(str(path) for folder in folders for path in Path(folder).glob("*/include"))
    return {
        "HPCOMM_USE_CUDA": "ON",
        "HPCOMM_CUDA_WHEEL_INCLUDE_DIRS": ";".join(headers),
        "CMAKE_CUDA_COMPILER": nvcc(),
        "CMAKE_CUDA_ARCHITECTURES": architectures(),
    }


def configure(folder: Path, *, editable: bool) -> None:
    """Runs CMake's configuration, which is cheap when nothing changed."""
    import torch
    from torch.utils import cpp_extension

    libraries = cpp_extension.library_paths()
    settings = {
        "HPCOMM_TORCH_INCLUDE_DIRS": ";".join(cpp_extension.include_paths()),
        "HPCOMM_TORCH_LIBRARY_DIRS": ";".join(libraries),
        "HPCOMM_TORCH_CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
        "HPCOMM_PYTHON": sys.executable,
        "HPCOMM_PYTHON_INCLUDE_DIR": sysconfig.get_path("include"),
        "HPCOMM_MODULE_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "HPCOMM_EXTRA_RPATH": ";".join(libraries) if editable else "",
        **cuda_settings(),
    }
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    if compiler_changed(folder):
        command.append("--fresh")
    command += [f"-D{name}={value}" for name, value in settings.items()]
    call(command + shlex.split(os.environ.get("CMAKE_ARGS", "")))


def compiler_changed(folder: Path) -> bool:
    """CMake looks at CXX, CXXFLAGS and the like in its first run only, and keeps what CMAKE_ARGS once said."""
    marker = folder / "compiler.txt"
    names = ("CXX", "CXXFLAGS", "LDFLAGS", "CUDAHOSTCXX", "CUDAFLAGS", "CMAKE_ARGS")
    now = "".join(f"{os.environ.get(name, '')}\n" for name in names) + f"{nvcc() if cuda().on else ''}\n"
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
        "USE_CUDA": cuda().on,
        "CUDA_VERSION": nvcc_release() if cuda().on else "",
        "CUDA_ARCHITECTURES": architectures(),
        "CXX": compiler_version(folder),
        "REVISION": revision(),
    }
    lines = ['"""What this copy of hpcomm was built with. Written by setup.py; not in version control."""', ""]
    lines += [f"{name} = {json.dumps(value) if isinstance(value, str) else value}" for name, value in values.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def revision() -> str:
    """The commit of this source; empty where it is no checkout, such as a source archive inside another repository."""
    top = output(["git", "-C", str(ROOT), "rev-parse", "--show-toplevel"])
    is_checkout = bool(top) and Path(top).resolve() == ROOT
    return output(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]) if is_checkout else ""


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


def is_binary() -> bool:
    """Whether the metadata being made are those of a build, which fits one torch, and not those of the sources."""
    return not {"bdist_wheel", "dist_info", "editable_wheel"}.isdisjoint(sys.argv)


def version() -> str:
    """0.1.0, and 0.1.0+cu130.torch2.11 or 0.1.0+cpu.torch2.13 of a build."""
    text = (ROOT / "hpcomm/_version.py").read_text()
    number = str(re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0])
    if not is_binary():
        return number
    return f"{number}+{cuda_choice.local_version(torch_version(), nvcc_release() if cuda().on else '')}"


def requirements() -> list[str]:
    """A build needs the minor version of torch that it was compiled against: c10d's classes change with it."""
    return [f"torch=={cuda_choice.minor(torch_version())}.*"] if is_binary() else ["torch>=2.11"]


def torch_version() -> str:
    """That of the torch to build against."""
    return str(import_torch().__version__)


setup(
    version=version(),
    install_requires=requirements(),
    ext_modules=[Extension("hpcomm._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy},
)
