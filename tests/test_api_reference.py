"""docs/reference/api.md, and docstrings of native classes: each is written once."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcomm

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/reference/api.md").read_text()
# Not classes or functions, but modules, whose parts stand in the page.
MODULES = {"errors", "nn", "plan", "report", "__version__"}
NATIVE = ["Communicator", "Work", "StepPlan", "CostModel", "StageCost", "Timeline", "RankTimes", "VerifyResult"]


def test_the_page_is_what_the_docstrings_say() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/api_reference.py", "--check"], check=True)


def test_every_public_name_has_its_place() -> None:
    sections = set(re.findall(r"^### (.+)$", PAGE, re.MULTILINE))
    assert set(hpcomm.__all__) - MODULES - sections == set()
    assert {"send", "recv", "compile", "tune", "parse"} <= sections
    assert PAGE.count("- `timeout`: seconds that one operation may take") == 1


def stub(name: str) -> ast.ClassDef:
    files = [ROOT / "hpcomm" / file for file in ("_C_comm.pyi", "_C_plan.pyi")]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    (found,) = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
    return found


@pytest.mark.parametrize("name", NATIVE)
def test_native_classes_say_what_their_stubs_say(name: str) -> None:
    native, node = getattr(hpcomm._C, name), stub(name)
    assert inspect.getdoc(native) == ast.get_docstring(node)
    compared = 0
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("__"):
            text = ast.get_docstring(one)
            assert text, f"{name}.{one.name} has no docstring"
            # Of a method the signature stands in front.
            assert inspect.cleandoc(getattr(native, one.name).__doc__).endswith(text)
            compared += 1
    for one, behind in zip(node.body, node.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
            assert isinstance(one.target, ast.Name)
            assert getattr(native, one.target.id).__doc__ == inspect.cleandoc(str(behind.value.value))
            compared += 1
    assert compared > 0
