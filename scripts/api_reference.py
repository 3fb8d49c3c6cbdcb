"""Writes docs/reference/api.md from the docstrings of what ``import hpcomm`` offers.

    python scripts/api_reference.py            # rewrites the page
    python scripts/api_reference.py --check    # exit code 1 when it is not what the docstrings say

Sources are read, not imported, so it needs no torch. Of native classes these are the .pyi files.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/api.md"

Documented = ast.ClassDef | ast.FunctionDef


class Part(NamedTuple):
    """A heading of the page: which names stand below it, and the files that define them."""

    heading: str
    names: tuple[str, ...]
    files: tuple[str, ...]


PARTS = (
    Part("The mesh", ("init", "Mesh"), ("hpcomm/mesh.py",)),
    Part(
        "Data parallel",
        ("DistributedDataParallel", "attach"),
        ("hpcomm/ddp/wrapper.py", "hpcomm/ddp/attached.py"),
    ),
    Part(
        "Pipelines",
        ("Pipeline", "Chain", "Balance", "materialize", "verify"),
        (
            "hpcomm/pipeline/pipeline.py",
            "hpcomm/pipeline/local.py",
            "hpcomm/pipeline/chain.py",
            "hpcomm/pipeline/partition.py",
            "hpcomm/pipeline/meta.py",
            "hpcomm/reference.py",
        ),
    ),
    Part("Gradients", ("GradScaler", "clip_grad_norm_"), ("hpcomm/amp.py",)),
    Part("Messages", ("Communicator", "Work", "Channel"), ("hpcomm/_C_comm.pyi", "hpcomm/channel.py")),
    Part("Messages with autograd: `hpcomm.nn`", ("send", "recv"), ("hpcomm/nn.py",)),
    Part(
        "Plans: `hpcomm.plan`",
        (
            "compile",
            "StepPlan",
            "CostModel",
            "StageCost",
            "Timeline",
            "RankTimes",
            "VerifyResult",
            "tune",
            "Candidate",
            "Choice",
            "Layer",
            "load_layers",
            "parse",
            "draw",
            "draw_ticks",
            "load_costs",
            "costs_from_json",
            "costs_to_json",
        ),
        (
            "hpcomm/_C_plan.pyi",
            "hpcomm/plan/compile.py",
            "hpcomm/plan/tuning.py",
            "hpcomm/plan/layers.py",
            "hpcomm/plan/table.py",
            "hpcomm/plan/timeline.py",
            "hpcomm/plan/costs.py",
        ),
    ),
    Part(
        "Plans as files: `hpcomm.plan`",
        ("to_json", "from_json", "to_csv", "plan_to_csv", "plan_from_csv", "table_from_csv"),
        ("hpcomm/plan/serialize.py", "hpcomm/plan/torch_csv.py"),
    ),
    Part("Traces: `hpcomm.report`", ("read", "table", "timeline", "picture"), ("hpcomm/trace.py", "hpcomm/report.py")),
    Part(
        "Errors: `hpcomm.errors`",
        (
            "HpcommError",
            "InvalidArgument",
            "SchemaMismatch",
            "ProtocolError",
            "DeadlockError",
            "NumericsMismatch",
            "TimedOut",
            "PeerError",
            "RankFailed",
            "Closed",
            "TransportError",
            "InternalError",
        ),
        ("hpcomm/errors.py",),
    ),
)
OPENING = """# The Python API

What `import hpcomm` offers; written by `scripts/api_reference.py` from the docstrings, which `help(hpcomm.init)` and
its like show as well. Words are those of [the architecture](../explanation/architecture.md)."""

# Classes of ours whose members stand under those that inherit from them.
_INSIDE = ("LocalModel",)

# Characters of a signature in one line.
WIDTH = 100

# Blocks of a docstring whose lines are `name: text`.
LISTS = ("Args", "Attributes", "Raises")


def markdown(docstring: str) -> str:
    """Its text as Markdown: roles and double backquotes as code, Args and Raises as lists."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", docstring).replace("``", "`")
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        head, _, body = block.partition(":\n")
        if head in LISTS:
            blocks.append(f"{head}:\n\n" + "\n".join(_items(textwrap.dedent(body))))
        elif head in ("Returns", "Yields") and body:
            blocks.append(f"{head}: {_line(body)}")
        elif block.startswith("    "):
            blocks.append(f"```\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(block.strip("\n"))
    return "\n\n".join(blocks)


def _line(text: str) -> str:
    return " ".join(text.split())


def _items(body: str) -> Iterator[str]:
    for item in re.split(r"\n(?=\S)", body.strip("\n")):
        name, colon, text = item.partition(": ")
        named = colon and re.fullmatch(r"[\w*, `.\[\]]+", name) is not None
        yield f"- `{name}`: {_line(text)}" if named and "`" not in name else f"- {_line(item)}"


def signature(function: ast.FunctionDef) -> str:
    """As it is called, without self; a class's without the name of its ``__init__``."""
    arguments = function.args
    bound = [*arguments.posonlyargs, *arguments.args]
    decorators = {ast.unparse(one) for one in function.decorator_list}
    if bound and bound[0].arg in ("self", "cls") and "staticmethod" not in decorators:
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    name = "" if function.name == "__init__" else function.name
    text = f"{name}({', '.join(_each(arguments))}){returns}".replace("'", '"')
    if len(text) > WIDTH:
        text = f"{name}(\n" + "".join(f"    {one},\n" for one in _each(arguments)) + f"){returns}".replace("'", '"')
    return text


def _each(arguments: ast.arguments) -> Iterator[str]:
    """The parameters with their defaults, as they are written in a definition."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    for i, one in enumerate(positional):
        yield _one(one, arguments.defaults[i - without] if i >= without else None)
    if arguments.vararg:
        yield f"*{_one(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _one(one, default)
    if arguments.kwarg:
        yield f"**{_one(arguments.kwarg, None)}"


def _one(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    if default is not None:
        text += f"{' = ' if argument.annotation else '='}{ast.unparse(default)}"
    return text.replace("'", '"')


def _is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one) in ("property", "functools.cached_property") for one in function.decorator_list)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Lines on the annotated attributes of a class, each with the docstring that follows it, or its comment's place."""
    for one, following in itertools.pairwise([*node.body, ast.Pass()]):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name) or one.target.id.startswith("_"):
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        text = str(following.value.value) if is_text else ""  # type: ignore[attr-defined]
        kind = ast.unparse(one.annotation).replace("'", '"')
        yield f"- `{one.target.id}: {kind}`" + (f": {_line(markdown(text))}" if text else "")


def _with_bases(node: ast.ClassDef, known: dict[str, Documented]) -> Iterator[ast.ClassDef]:
    """The class and those of its bases that are ours, in the order in which a name is looked up."""
    yield node
    for base in node.bases:
        found = known.get(ast.unparse(base))
        if isinstance(found, ast.ClassDef):
            yield from _with_bases(found, known)


def described(node: Documented, known: dict[str, Documented]) -> str:
    """A section of the page; ``known`` are the definitions of its part's files."""
    docstring = markdown(ast.get_docstring(node) or "")
    if isinstance(node, ast.FunctionDef):
        return f"### {node.name}\n\n```python\n{signature(node)}\n```\n\n{docstring}"
    classes = list(_with_bases(node, known))
    functions = [one for each in classes for one in each.body if isinstance(one, ast.FunctionDef)]
    made = next((signature(one) for one in functions if one.name == "__init__"), "")
    shown = [ast.unparse(base) for base in node.bases]
    bases = ", ".join(base for base in shown if base not in ("Enum", "NamedTuple") and base not in _INSIDE)
    opening = f"{node.name}{made}" if made else f"class {node.name}({bases})" if bases else f"class {node.name}"
    parts = [f"### {node.name}", f"```python\n{opening}\n```"]
    if docstring:
        parts.append(docstring)
    if fields := [line for each in classes for line in _fields(each)]:
        parts.append("\n".join(fields))
    members: list[str] = []
    seen: set[str] = set()
    for one in functions:
        if one.name.startswith("_") or one.name in seen:
            continue
        seen.add(one.name)
        text = markdown(ast.get_docstring(one) or "")
        head = one.name if _is_property(one) else signature(one)
        members.append(f"```python\n{head}\n```" + (f"\n\n{text}" if text else ""))
    return "\n\n".join(parts + members)


def definitions(files: tuple[str, ...]) -> dict[str, Documented]:
    """What the files define at their top level; the first of the overloads of a function."""
    found: dict[str, Documented] = {}
    for file in files:
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.setdefault(node.name, node)
    return found


def page() -> str:
    """The whole page."""
    parts = [OPENING]
    for part in PARTS:
        found = definitions(part.files)
        parts.append(f"## {part.heading}")
        parts += [described(found[name], found) for name in part.names]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Writes the page, or looks at it."""
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is old: run python scripts/api_reference.py")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
