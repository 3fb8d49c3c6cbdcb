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


def test_cuda_is_refused_in_plain_words(tmp_path: Path) -> None:
    result = configure(tmp_path, "-DHPCOMM_USE_CUDA=ON")
    assert result.returncode != 0
    assert "CUDA half is not part of this version" in " ".join(result.stderr.split())


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
