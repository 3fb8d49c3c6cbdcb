"""Writes the docstrings of hpcomm/_C*.pyi as a C++ header: the bindings take them from there, so each is written once.

    python cmake/native_docs.py HEADER FILE.pyi ...

``docs::StepPlan::kClass`` is that of the class, ``docs::StepPlan::verify`` that of a method, a property or an attribute
(a string behind its annotation).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

FRAME = """// Made by cmake/native_docs.py; the texts stand in hpcomm/_C*.pyi.
#pragma once

namespace hpcomm::docs {{

{classes}

}}  // namespace hpcomm::docs
"""


def constant(name: str, text: str) -> str:
    """A C++ member that holds ``text``."""
    return f'  static constexpr char {name}[] = R"doc({text})doc";'


def members(node: ast.ClassDef) -> Iterator[str]:
    """What is documented in a class."""
    if text := ast.get_docstring(node):
        yield constant("kClass", text)
    written = set()
    for one, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.FunctionDef) and one.name not in written and (text := ast.get_docstring(one)):
            written.add(one.name)
            yield constant(one.name, text)
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            yield constant(one.target.id, cleandoc(str(following.value.value)))


def header(files: list[Path]) -> str:
    """The whole header."""
    nodes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    documented = [(node.name, list(members(node))) for node in nodes]
    classes = ["\n".join([f"struct {name} {{", *lines, "};"]) for name, lines in documented if lines]
    return FRAME.format(classes="\n\n".join(classes))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header([Path(name) for name in sys.argv[2:]]))
