"""The package as a user meets it: import costs nothing, every public name exists, the stub says what the module has."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hpcomm
from hpcomm import _C

ROOT = Path(hpcomm.__file__).parent


def test_import_does_no_work() -> None:
    code = "import sys, hpcomm; print(hpcomm.__version__, 'torch' in sys.modules, 'hpcomm._C' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [hpcomm.__version__, "False", "False"]


def test_submodules_by_name() -> None:
    for name in ("errors", "nn", "plan", "report"):
        code = f"import hpcomm; print(hpcomm.{name}.__name__)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"hpcomm.{name}\n"


def test_native_module_by_name() -> None:
    for code in ("import hpcomm; hpcomm._C.Work", "import torch, hpcomm._C; hpcomm._C.Work"):
        subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_every_public_name_exists() -> None:
    for name in hpcomm.__all__:
        assert getattr(hpcomm, name) is not None
    for module in (hpcomm.nn, hpcomm.plan, hpcomm.report):
        for name in module.__all__:
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hpcomm.nothing


def stub() -> dict[str, set[str]]:
    """Class -> members, and "" -> functions, of the files _C_*.pyi."""
    found: dict[str, set[str]] = {"": set()}
    for node in (node for path in ROOT.glob("_C_*.pyi") for node in ast.parse(path.read_text()).body):
        if isinstance(node, ast.FunctionDef):
            found[""].add(node.name)
        elif isinstance(node, ast.ClassDef):
            members = found.setdefault(node.name, set())
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    members.add(item.name)
                elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    members.add(item.target.id)
    return found


def test_the_stub_has_what_the_module_has() -> None:
    declared = stub()
    named = {
        alias.name
        for node in ast.parse((ROOT / "_C.pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert named == (declared.keys() - {""}) | declared[""]
    native = {name: value for name, value in vars(_C).items() if not name.startswith("_")}
    classes = {name for name, value in native.items() if inspect.isclass(value)}
    assert classes == declared.keys() - {""}
    assert native.keys() - classes == declared[""]
    for name in classes:
        members = {member for member in vars(native[name]) if not member.startswith("_")}
        stated = {member for member in declared[name] if not member.startswith("_")}
        assert members == stated, name
