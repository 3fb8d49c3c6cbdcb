"""The house rules, proved from the files: layers, imports, sizes, and that CMake lists what exists.

Every rule is a function from a tree to a list of complaints, and has a test in which a small broken tree is caught.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

# Lowest first: a folder of csrc/ includes itself and those before it.
LAYERS = ("base", "plan", "stream", "pack", "control", "comm", "engine", "torch")

# Lowest first: a module of hpcomm/ imports those before it. `_C` is the native module; a package is above its parts.
MODULES = (
    "errors",
    "settings",
    "_version",
    "_build",
    "nccl_variables",
    "at_exit",
    "_native",
    "_C",
    "tree",
    "devices",
    "interfaces",
    "seats",
    "control_channels",
    "rendezvous",
    "leaving",
    "communicator",
    "channel",
    "job",
    "named_group",
    "backend",
    "mesh",
    "ddp.module",
    "ddp.parameters",
    "ddp.lane",
    "ddp.told",
    "ddp.states",
    "ddp.choice",
    "ddp.meeting",
    "ddp.attached",
    "ddp.sizes",
    "ddp.steplog",
    "ddp.native",
    "ddp.countdown",
    "ddp.sharded_state",
    "ddp.sharded",
    "ddp.divided",
    "ddp.wrapper",
    "ddp",
    "nn",
    "plan.files",
    "plan.table",
    "plan.loops",
    "plan.zero_bubble",
    "plan.schedules",
    "plan.costs",
    "plan.compile",
    "plan.serialize",
    "plan.timeline",
    "plan.torch_csv",
    "plan.render",
    "plan.chrome",
    "plan.layers",
    "plan.tuning",
    "plan.command",
    "plan",
    "pipeline.microbatch",
    "pipeline.randomness",
    "pipeline.chain",
    "pipeline.decoder",
    "pipeline.traced",
    "pipeline.adapt",
    "pipeline.meta",
    "pipeline.profile",
    "pipeline.balance",
    "pipeline.partition",
    "pipeline.checks",
    "pipeline.links",
    "pipeline.deferred",
    "pipeline.sharing",
    "pipeline.parameters",
    "pipeline.homes",
    "pipeline.unit",
    "pipeline.optimizer_state",
    "pipeline.local",
    "pipeline.planning",
    "pipeline.draft",
    "pipeline.board",
    "pipeline.stage",
    "pipeline.ordered",
    "pipeline.presence",
    "pipeline.recorder",
    "pipeline.reductions",
    "pipeline.runner",
    "pipeline.failure",
    "pipeline.pipeline",
    "pipeline",
    "amp",
    "reference",
    "trace",
    "report",
    "",  # hpcomm itself: the list of public names
    "doctor.finding",
    "doctor.alone",
    "doctor.together",
    "doctor",
    "cli",
    "__main__",
)

NO_TORCH = ("torch/", "c10/", "ATen/", "caffe2/", "pybind11/", "Python.h")
MAX_LINES = 500


# --- C++ --------------------------------------------------------------------------------------------------------------


def sources(root: Path, folder: str, *suffixes: str) -> list[Path]:
    """Files below root/folder, as paths relative to root/folder."""
    base = root / folder
    return sorted(path.relative_to(base) for path in base.rglob("*") if path.suffix in suffixes)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def wrong_includes(root: Path) -> list[str]:
    """Upward includes, includes of a sibling transport, torch outside csrc/torch, included .cpp files."""
    complaints = []
    for path in sources(root, "csrc", ".h", ".cpp", ".cu"):
        layer = path.parts[0]
        for name in includes(root / "csrc" / path):
            where = f"csrc/{path} includes {name}"
            if Path(name).suffix in {".cpp", ".cu"}:
                complaints.append(f"{where}: a source file")
            if layer not in LAYERS:
                complaints.append(f"csrc/{path}: {layer}/ is no layer")
            elif layer != "torch" and name.startswith(NO_TORCH):
                complaints.append(f"{where}: torch and Python belong in csrc/torch")
            elif Path(name).parts[0] in LAYERS and LAYERS.index(Path(name).parts[0]) > LAYERS.index(layer):
                complaints.append(f"{where}: a layer above")
            elif layer == "comm" and Path(name).parts[0] == "comm" and not beside_or_below(path, Path(name)):
                complaints.append(f"{where}: transports know comm/, not each other, and comm/ knows no transport")
    return complaints


def beside_or_below(path: Path, included: Path) -> bool:
    """Within csrc/comm: the included file lies in this file's folder or in comm/ itself."""
    return included.parent in {path.parent, Path("comm")}


def hidden_torch_headers(root: Path, torch_include: Path) -> list[str]:
    """Headers of csrc/torch that torch has, too: with csrc/ on the include path, <torch/NAME> would find ours."""
    return [
        f"csrc/{path} hides torch's header of that name"
        for path in sources(root, "csrc", ".h")
        for folder in (torch_include, torch_include / "torch/csrc/api/include")
        if path.parts[0] == "torch" and (folder / path).exists()
    ]


def python_in_torch_half(root: Path, torch_include: Path) -> list[str]:
    """Files of CMake's hpcomm_torch that reach pybind11 or Python, through torch's headers as well, on which way."""
    text = (root / "CMakeLists.txt").read_text()
    (half,) = re.findall(r"add_library\(\s*hpcomm_torch OBJECT\s+([^)]*)\)", text)
    half += " ".join(["", *re.findall(r"target_sources\(hpcomm_torch PRIVATE ([^)]*)\)", text)])
    precompiled = re.findall(r"target_precompile_headers\(hpcomm_torch PRIVATE\s+([^)]*)\)", text)
    folders = (root / "csrc", torch_include, torch_include / "torch/csrc/api/include")
    seen: set[str] = set()
    complaints = []

    def follow(way: list[str], names: list[str]) -> None:
        for name in names:
            if name.startswith("pybind11/") or name == "Python.h":
                complaints.append(" -> ".join([*way, name]))
            elif name not in seen:
                seen.add(name)
                found = [folder / name for folder in folders if (folder / name).exists()]
                follow([*way, name], includes(found[0]) if found else [])

    for source in half.split():
        follow([source], includes(root / source))
    follow(["CMakeLists.txt"], re.findall(r"<(.+?)>", " ".join(precompiled)))
    return complaints


def cmake_sources(root: Path) -> set[str]:
    """The source files that CMakeLists.txt names, relative to the root."""
    text = re.sub(r"#.*", "", (root / "CMakeLists.txt").read_text())
    found = set(re.findall(r"(?:csrc|tests)/[\w/]+\.(?:cpp|cu)", text))
    for layer, names in re.findall(r"hpcomm_layer\(\s*(\w+)\s+\S+\s+([^)]*)\)", text):
        found |= {f"csrc/{layer}/{name}" for name in names.split() if not name.startswith("${")}
    for layer, names in re.findall(r"set\(\s*(\w+)_twin\s+([^)]*)\)", text):
        found |= {f"csrc/{layer}/{name}" for name in names.split() if not name.startswith("tests/")}
    return found


def wrong_lists(root: Path) -> list[str]:
    """Sources that CMake lists and nobody wrote, or that somebody wrote and CMake does not list."""
    listed = cmake_sources(root)
    existing = {
        f"{folder}/{path}" for folder in ("csrc", "tests/native") for path in sources(root, folder, ".cpp", ".cu")
    }
    return [f"CMakeLists.txt lists {name}, which does not exist" for name in sorted(listed - existing)] + [
        f"{name} is not in CMakeLists.txt" for name in sorted(existing - listed)
    ]


# --- Python -----------------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """plan/compile.py -> "plan.compile", plan/__init__.py -> "plan"."""
    parts = list(path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, inside functions as well, but not what stands under `if TYPE_CHECKING:`."""
    yield node
    if isinstance(node, ast.If) and is_type_checking(node.test):
        for child in node.orelse:
            yield from runtime_nodes(child)
        return
    for child in ast.iter_child_nodes(node):
        yield from runtime_nodes(child)


def imported(path: Path, name: str, *, package: bool) -> Iterator[str]:
    """Modules of hpcomm that a file imports at run time, without the leading "hpcomm."."""
    here = ["hpcomm", *name.split(".")] if name else ["hpcomm"]
    for node in runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from hpcomm import mesh` imports hpcomm.mesh; `from hpcomm.mesh import init` imports hpcomm.mesh.
            targets = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target == "hpcomm" or target.startswith("hpcomm."):
                yield longest_module(target.removeprefix("hpcomm").removeprefix("."))


def longest_module(name: str) -> str:
    """The declared module that `name` is, or is a part of: "mesh.init" -> "mesh"."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def wrong_imports(root: Path) -> list[str]:
    """Imports of a module that stands later in MODULES, and modules that do not stand there at all."""
    complaints = []
    for path in sources(root, "hpcomm", ".py"):
        name = module_name(path)
        if name not in MODULES:
            complaints.append(f"hpcomm/{path}: give it a place in MODULES of tests/test_tree.py")
            continue
        complaints += [
            f"hpcomm/{path} imports {target or 'hpcomm'}, which stands above it"
            for target in imported(root / "hpcomm" / path, name, package=path.name == "__init__.py")
            if MODULES.index(target) > MODULES.index(name)
        ]
    return complaints


# --- Both -------------------------------------------------------------------------------------------------------------


def wrong_files(root: Path) -> list[str]:
    """Files that are too long, or whose first line does not say what they are for."""
    complaints = []
    for folder in ("csrc", "hpcomm"):
        for path in sources(root, folder, ".h", ".cpp", ".cu", ".py", ".pyi"):
            lines = (root / folder / path).read_text().splitlines()
            if len(lines) > MAX_LINES:
                complaints.append(f"{folder}/{path} has {len(lines)} lines, more than {MAX_LINES}: find the second job")
            start = '"""' if path.suffix in {".py", ".pyi"} else "// "
            if not lines or not lines[0].startswith(start):
                complaints.append(f"{folder}/{path}: the first line says what the file is for")
    return complaints


# --- The tree we have -------------------------------------------------------------------------------------------------


def test_includes() -> None:
    assert wrong_includes(ROOT) == []


def test_the_half_of_torch_does_without_python() -> None:
    assert python_in_torch_half(ROOT, Path(torch.__file__).parent / "include") == []


def test_no_header_hides_one_of_torch() -> None:
    assert hidden_torch_headers(ROOT, Path(torch.__file__).parent / "include") == []


def test_cmake_lists_the_sources() -> None:
    assert wrong_lists(ROOT) == []


def test_imports() -> None:
    assert wrong_imports(ROOT) == []


def channel_numbers(root: Path) -> dict[str, list[str]]:
    """Names by the number of a Control channel that a constant anywhere in the tree gives them."""
    found: dict[str, list[str]] = {}
    native = re.compile(r"constexpr std::uint64_t (k\w*Channel) = (\d+);")
    python = re.compile(r"^ +([A-Z_]+) = (\d+)", re.MULTILINE)
    stray = re.compile(r"^(\w*CHANNEL\w*) = (\d+)", re.MULTILINE)
    for path in sources(root, "csrc", ".h", ".cpp"):
        for name, number in native.findall((root / "csrc" / path).read_text()):
            found.setdefault(number, []).append(f"{path}: {name}")
    for path in sources(root, "hpcomm", ".py"):
        for name, number in (python if path.name == "control_channels.py" else stray).findall(
            (root / "hpcomm" / path).read_text()
        ):
            found.setdefault(number, []).append(f"{path}: {name}")
    return found


def test_control_channels_have_numbers_of_their_own() -> None:
    found = channel_numbers(ROOT)
    first = next(number for number, names in found.items() if "control/channels.h: kFirstPythonChannel" in names)
    found[first].remove("control/channels.h: kFirstPythonChannel")
    assert len(found) > 12
    for number, names in found.items():
        assert len(names) == 1, f"Control channel {number} is that of {names}"
        place = "control/channels.h" if int(number) < int(first) else "control_channels.py"
        assert names[0].startswith(place), f"{names[0]} = {number} belongs into {place}"


def test_a_control_channel_with_two_names_is_found(tmp_path: Path) -> None:
    for name, text in {
        "csrc/comm/a.cpp": "constexpr std::uint64_t kOneChannel = 4;\n",
        "hpcomm/control_channels.py": "class ControlChannel(enum.IntEnum):\n    TWO = 4\n    THREE = 5  # more\n",
        "hpcomm/b.py": "_FOUR_CHANNEL = 5\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert channel_numbers(tmp_path) == {
        "4": ["comm/a.cpp: kOneChannel", "control_channels.py: TWO"],
        "5": ["b.py: _FOUR_CHANNEL", "control_channels.py: THREE"],
    }


def test_files_are_short_and_say_what_they_are_for() -> None:
    assert wrong_files(ROOT) == []


# --- The rules can fail -----------------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("csrc/plan/a.h", '#include "comm/b.h"', "a layer above"),
        ("csrc/engine/a.h", '  #  include "torch/tensor.h"', "belong in csrc/torch"),
        ("csrc/base/a.h", "#include <Python.h>", "belong in csrc/torch"),
        ("csrc/comm/a.cpp", "#include <c10/core/Device.h>", "belong in csrc/torch"),
        ("csrc/base/a.cpp", '#include "base/b.cpp"', "a source file"),
        ("csrc/comm/shm/a.cpp", '#include "comm/nccl/b.h"', "not each other"),
        ("csrc/comm/a.cpp", '#include "comm/nccl/b.h"', "knows no transport"),
        ("csrc/extra/a.cpp", "#include <vector>", "no layer"),
    ],
)
def test_wrong_includes_are_found(tmp_path: Path, path: str, text: str, complaint: str) -> None:
    (found,) = wrong_includes(tree(tmp_path, {path: f"// A file.\n{text}\n"}))
    assert complaint in found


def test_right_includes_are_not_complained_about(tmp_path: Path) -> None:
    files = {
        "csrc/plan/a.h": '#include "base/b.h"\n#include "plan/c.h"\n#include <vector>\n',
        "csrc/comm/shm/a.cpp": '#include "comm/shm/a.h"\n#include "comm/work.h"\n#include "stream/event.h"\n',
        "csrc/engine/a.cpp": '#include "comm/shm/a.h"\n// #include <torch/torch.h>\n',
        "csrc/torch/a.cpp": '#include <torch/extension.h>\n#include "torch/tensor.h"\n#include "engine/edge.h"\n',
    }
    assert wrong_includes(tree(tmp_path, files)) == []


def test_a_header_that_hides_torchs_is_found(tmp_path: Path) -> None:
    torchs = tree(tmp_path / "include", {"torch/csrc/api/include/torch/utils.h": ""})
    ours = tree(tmp_path / "ours", {"csrc/torch/utils.h": "", "csrc/torch/gil.h": ""})
    assert hidden_torch_headers(ours, torchs) == ["csrc/torch/utils.h hides torch's header of that name"]


def test_python_in_the_half_of_torch_is_found(tmp_path: Path) -> None:
    torchs = tree(tmp_path / "include", {"torch/csrc/Exceptions.h": "#include <pybind11/pybind11.h>\n"})
    files = {
        "CMakeLists.txt": "add_library(hpcomm_torch OBJECT csrc/torch/a.cpp)\n"
        "target_sources(hpcomm_torch PRIVATE csrc/torch/b.cpp)\ntarget_sources(hpcomm_C PRIVATE csrc/torch/c.cpp)\n"
        "target_precompile_headers(hpcomm_torch PRIVATE\n  <vector>\n  <pybind11/stl.h>)\n",
        "csrc/torch/a.cpp": '#include "torch/a.h"\n#include <ATen/ATen.h>\n',
        "csrc/torch/a.h": '#include "torch/gil.h"\n#include "torch/a.h"\n',
        "csrc/torch/gil.h": "#include <torch/csrc/Exceptions.h>\n",
        "csrc/torch/b.cpp": "#include <Python.h>\n",
        "csrc/torch/c.cpp": "#include <pybind11/stl.h>\n",
    }
    assert python_in_torch_half(tree(tmp_path, files), torchs) == [
        "csrc/torch/a.cpp -> torch/a.h -> torch/gil.h -> torch/csrc/Exceptions.h -> pybind11/pybind11.h",
        "csrc/torch/b.cpp -> Python.h",
        "CMakeLists.txt -> pybind11/stl.h",
    ]


def test_wrong_lists_are_found(tmp_path: Path) -> None:
    listed = """
        hpcomm_layer(base Threads::Threads
          a.cpp
          gone.cpp)
        add_library(hpcomm_C MODULE csrc/torch/module.cpp)
        # csrc/base/forgotten.cpp
        add_executable(tests tests/native/main.cpp)
    """
    names = ["csrc/base/a.cpp", "csrc/base/forgotten.cpp", "csrc/torch/module.cpp", "tests/native/main.cpp"]
    assert wrong_lists(tree(tmp_path, {"CMakeLists.txt": listed, **dict.fromkeys(names, "")})) == [
        "CMakeLists.txt lists csrc/base/gone.cpp, which does not exist",
        "csrc/base/forgotten.cpp is not in CMakeLists.txt",
    ]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("hpcomm/errors.py", "from hpcomm.mesh import init"),
        ("hpcomm/errors.py", "from hpcomm import mesh"),
        ("hpcomm/errors.py", "import hpcomm.mesh as m"),
        ("hpcomm/errors.py", "from .mesh import init"),
        ("hpcomm/errors.py", "from . import mesh"),
        ("hpcomm/errors.py", "def f():\n    from hpcomm.mesh import init"),
        ("hpcomm/errors.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import hpcomm.mesh"),
        ("hpcomm/mesh.py", "import hpcomm"),
        ("hpcomm/mesh.py", "from hpcomm import init"),
        ("hpcomm/plan/compile.py", "from hpcomm.plan.serialize import to_json"),
        ("hpcomm/plan/compile.py", "from . import serialize"),
        ("hpcomm/plan/compile.py", "from ..pipeline import Pipeline"),
        ("hpcomm/plan/__init__.py", "from ..pipeline import Pipeline"),
    ],
)
def test_wrong_imports_are_found(tmp_path: Path, path: str, text: str) -> None:
    (found,) = wrong_imports(tree(tmp_path, {path: text}))
    assert "which stands above it" in found


def test_a_module_without_a_place_is_found(tmp_path: Path) -> None:
    assert "give it a place" in wrong_imports(tree(tmp_path, {"hpcomm/new.py": ""}))[0]


def test_right_imports_are_not_complained_about(tmp_path: Path) -> None:
    files = {
        "hpcomm/__init__.py": "from hpcomm.mesh import init",
        "hpcomm/mesh.py": "from hpcomm.errors import X\nif TYPE_CHECKING:\n    from hpcomm.pipeline import Pipeline",
        "hpcomm/ddp.py": "from hpcomm import _C\nfrom .mesh import init\nimport torch, hpcommunity",
        "hpcomm/plan/__init__.py": "from .compile import compile\nfrom hpcomm.plan.schedules import gpipe",
        "hpcomm/plan/compile.py": "from . import schedules\nfrom .schedules import gpipe\nfrom .. import errors",
    }
    assert wrong_imports(tree(tmp_path, files)) == []


def test_wrong_files_are_found(tmp_path: Path) -> None:
    files = {
        "csrc/base/long.h": "// Long.\n" * (MAX_LINES + 1),
        "hpcomm/silent.py": "import os\n",
        "hpcomm/empty.py": "",
        "hpcomm/fine.py": '"""Fine."""\n',
    }
    assert [complaint.split()[0].rstrip(":") for complaint in wrong_files(tree(tmp_path, files))] == [
        "csrc/base/long.h",
        "hpcomm/empty.py",
        "hpcomm/silent.py",
    ]
