"""The build stops early and says what to do: missing tools, another pybind11, CUDA, another torch at load time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pybind11
import pytest
import torch
from torch.utils import cpp_extension

import hpcomm
from hpcomm import _build, _native

ROOT = Path(__file__).resolve().parent.parent


# --- scripts/check_machine.sh -----------------------------------------------------------------------------------------


def check_machine(**variables: str) -> subprocess.CompletedProcess[str]:
    """The script's verdict with these variables and nothing else in its environment."""
    return subprocess.run(
        [shutil.which("sh") or "/bin/sh", str(ROOT / "scripts/check_machine.sh")],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def fake(path: Path, script: str) -> str:
    """An executable that runs a shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_this_machine_will_do() -> None:
    result = check_machine()
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_no_python() -> None:
    result = check_machine(PYTHON="/nonexistent/python3")
    assert result.returncode == 1
    assert "'/nonexistent/python3' does not run" in result.stderr
    assert "sudo apt install python3 python3-dev python3-venv" in result.stderr
    assert "sudo dnf install python3 python3-devel" in result.stderr


def test_old_python(tmp_path: Path) -> None:
    old = fake(
        tmp_path / "python3",
        'case "$*" in *version_info*) exit 1;; -V) echo Python 3.8.10;; esac',
    )
    result = check_machine(PYTHON=old)
    assert result.returncode == 1
    assert "Python 3.10 or newer" in result.stderr
    assert "Python 3.8.10" in result.stderr
    assert "make PYTHON=" in result.stderr


def test_python_without_venv_and_headers(tmp_path: Path) -> None:
    bare = fake(tmp_path / "python3.12", 'case "$*" in *ensurepip* | *Python.h*) exit 1;; esac')
    result = check_machine(PYTHON=bare)
    assert result.returncode == 1
    assert "sudo apt install python3.12-venv python3.12-dev" in result.stderr
    assert "sudo dnf install python3.12 python3.12-devel" in result.stderr


def test_no_compiler() -> None:
    result = check_machine(CXX="/nonexistent/g++")
    assert result.returncode == 1
    assert "'/nonexistent/g++', which does not exist" in result.stderr
    assert "sudo apt install g++" in result.stderr
    assert "sudo dnf install gcc-c++" in result.stderr


def test_no_compiler_on_the_path(tmp_path: Path) -> None:
    for tool in ("uname", "basename"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    result = check_machine(PATH=str(tmp_path))
    assert "a C++ compiler\n" in result.stderr


def test_old_compiler(tmp_path: Path) -> None:
    result = check_machine(CXX=fake(tmp_path / "g++", "exit 1"))
    assert result.returncode == 1
    assert "C++20 compiler" in result.stderr


def test_all_that_is_missing_is_said_at_once() -> None:
    result = check_machine(PYTHON="/nonexistent/python3", CXX="/nonexistent/g++")
    assert "sudo apt install python3 python3-dev python3-venv g++" in result.stderr


# --- CMake ------------------------------------------------------------------------------------------------------------


def configure(folder: Path, *settings: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs CMake's configuration as setup.py does."""
    scripts = sysconfig.get_path("scripts")
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [
            shutil.which("cmake", path=path) or "cmake",
            *("-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
            f"-DHPCOMM_TORCH_INCLUDE_DIRS={';'.join(cpp_extension.include_paths())}",
            f"-DHPCOMM_PYTHON_INCLUDE_DIR={sysconfig.get_path('include')}",
            *settings,
        ],
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_torchs_pybind11_is_accepted(tmp_path: Path) -> None:
    result = configure(tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("variable", ["CPATH", "CXXFLAGS"])
def test_another_pybind11_is_refused(tmp_path: Path, variable: str) -> None:
    other = pybind11.get_include()
    value = f"-I{other}" if variable == "CXXFLAGS" else other
    result = configure(tmp_path, **{variable: value})
    assert result.returncode != 0
    assert "Another pybind11 than torch's" in result.stderr
    assert f"{other}/pybind11/pybind11.h" in result.stderr


def test_a_missing_function_of_ours_is_found_when_linking(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or "c++"
    for name, body in {"whole": "{ return 1; }", "lacking": ";"}.items():
        source = tmp_path / f"{name}.cpp"
        source.write_text(f"namespace hpcomm {{ int part() {body} }}\nint whole() {{ return hpcomm::part(); }}\n")
        module = tmp_path / f"{name}.so"
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(module)], check=True, timeout=60)
        path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
        command = [shutil.which("cmake", path=path) or "cmake", f"-DNM={shutil.which('nm')}", f"-DMODULE={module}"]
        command += ["-P", str(ROOT / "cmake/CheckUndefined.cmake")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode == 0) is (name == "whole"), result.stderr
        assert ("hpcomm::part()" in result.stderr) is (name == "lacking")


def test_what_ptxas_says_is_kept_in_a_file(tmp_path: Path) -> None:
    says = "ptxas info    : Used 12 registers\n    0 bytes stack frame, 0 bytes spill stores\nfile.cu(3): warning: odd"
    nvcc = fake(tmp_path / "nvcc", f"printf '%s\\n' '{says}' >&2; exit 3")
    command = [shutil.which("sh") or "/bin/sh", str(ROOT / "cmake/ptxas_log.sh"), str(tmp_path / "logs"), nvcc]
    command += ["-c", "pack.cu", "-o", "folder/pack.cu.o"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (3, "file.cu(3): warning: odd\n")
    assert (tmp_path / "logs/pack.cu.log").read_text() == says + "\n"


# --- setup.py ---------------------------------------------------------------------------------------------------------


def setup(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """setup.py's answer; the commands used here compile nothing."""
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def metadata(folder: Path) -> str:
    """The METADATA or PKG-INFO below a folder."""
    (found,) = [path for path in folder.rglob("*") if path.name in {"METADATA", "PKG-INFO"}]
    return found.read_text()


def test_cuda_is_refused_where_something_is_missing(tmp_path: Path) -> None:
    result = setup(
        "build_ext", "--build-lib", str(tmp_path), USE_CUDA="1", CUDA_HOME=str(tmp_path), HPCOMM_BUILD_DIR=str(tmp_path)
    )
    assert result.returncode != 0
    lack = "there is no nvcc" if torch.version.cuda else f"({torch.__version__}) is a build without CUDA"
    assert "hpcomm: USE_CUDA=1, but " in result.stderr
    assert lack in result.stderr
    assert "Traceback" not in result.stderr


def test_a_build_says_which_torch_it_fits(tmp_path: Path) -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    built = setup("dist_info", "--output-dir", str(tmp_path), USE_CUDA="0")
    assert built.returncode == 0, built.stderr
    text = metadata(tmp_path)
    assert f"\nVersion: {hpcomm.__version__}+cpu.torch{minor}\n" in text
    assert f"\nRequires-Dist: torch=={minor}.*\n" in text


def test_sources_fit_every_torch_that_is_supported(tmp_path: Path) -> None:
    made = setup("egg_info", "--egg-base", str(tmp_path), USE_CUDA="1", CUDA_HOME=str(tmp_path))
    assert made.returncode == 0, made.stderr
    text = metadata(tmp_path)
    assert f"\nVersion: {hpcomm.__version__}\n" in text
    assert "\nRequires-Dist: torch>=2.11\n" in text


# --- hpcomm/_native.py ------------------------------------------------------------------------------------------------


@pytest.fixture
def _loads_again() -> Iterator[None]:
    """load() forgets what it did before, and what it did in this test."""
    _native.load.cache_clear()
    yield
    _native.load.cache_clear()


@pytest.mark.usefixtures("_loads_again")
def test_another_torch_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "TORCH_VERSION", "2.11.0+cpu")
    with pytest.raises(ImportError) as caught:
        _native.load()
    text = str(caught.value)
    assert "built for torch 2.11.0+cpu" in text
    assert f"torch {torch.__version__} is installed" in text
    assert f"pip install --no-build-isolation --force-reinstall --no-deps {ROOT}" in text


@pytest.mark.usefixtures("_loads_again")
def test_a_missing_module_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hpcomm._build", None)
    monkeypatch.delattr("hpcomm._build")
    with pytest.raises(ImportError, match="make build"):
        _native.load()


@pytest.mark.usefixtures("_loads_again")
def test_a_module_of_other_sources_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> None:
        raise ImportError("initialization failed")

    monkeypatch.setattr(_native.importlib, "import_module", fails)
    with pytest.raises(ImportError, match=r"does not load: initialization failed\. .*newer than it is.*make build"):
        _native.load()


@pytest.mark.parametrize(
    ("built", "built_cuda", "installed", "installed_cuda", "fits"),
    [
        ("2.13.0+cpu", "", "2.13.0+cpu", "", True),
        ("2.13.0+cpu", "", "2.13.1+cpu", "", True),
        ("2.13.0+cpu", "", "2.13.0+cu130", "13.0", True),
        ("2.13.0a0+gitabc", "", "2.13.0", "", True),
        ("2.13.0+cu130", "13.0", "2.13.0+cu132", "13.2", True),
        ("2.13.0+cu130", "13.0", "2.13.0+cu128", "12.8", False),
        ("2.13.0+cu130", "13.0", "2.13.0+cpu", "", False),
        ("2.13.0+cpu", "", "2.14.0+cpu", "", False),
        ("2.13.0+cpu", "", "2.1.3", "", False),
        ("2.13.0+cpu", "", "3.13.0", "", False),
    ],
)
def test_which_torch_fits(built: str, built_cuda: str, installed: str, installed_cuda: str, fits: bool) -> None:
    assert (_native._mismatch(built, built_cuda, installed, installed_cuda) == "") is fits
