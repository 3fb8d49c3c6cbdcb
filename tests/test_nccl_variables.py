"""NCCL reads a variable once: import hpcomm sets some, and it believes only in what NCCL must have found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from hpcomm import nccl_variables

# As a process in which torch has used the GPU; nobody has one here, and of torch nothing else is asked.
_CUDA_IN_USE = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].cuda = types.SimpleNamespace(is_initialized=lambda: True)
"""

# As where there is a driver, for CUDA 12.2.
_OLD_DRIVER = """
import ctypes
class Driver:
    def __init__(self, name):
        assert name == "libcuda.so.1"
    def cuDriverGetVersion(self, version):
        version._obj.value = 12020
        return 0
ctypes.CDLL = Driver
"""


def found(program: str, **variables: str) -> list[str]:
    """What a program prints that was started with these variables."""
    code = textwrap.dedent(program) + "import os; print(nccl_variables.ORDER_IN_TIME, os.environ[nccl_variables.ORDER])"
    clean = {name: value for name, value in os.environ.items() if name not in nccl_variables.DEFAULTS}
    environment = {**clean, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [
        ("", {}, ["True", "1"]),
        ("import torch\n", {}, ["True", "1"]),
        ("import torch\ntorch.cuda.is_initialized = lambda: True\n", {}, ["False", "1"]),
        (_CUDA_IN_USE, {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, ["True", "1"]),
        ("", {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, ["False", "0"]),
        (_CUDA_IN_USE, {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, ["False", "0"]),
        ("", {"NCCL_LAUNCH_ORDER_IMPLICIT": "yes"}, ["False", "yes"]),  # NCCL takes it for its default, 0
    ],
)
def test_it_is_in_time_where_nccl_cannot_have_been_used(
    before: str, given: dict[str, str], expected: list[str]
) -> None:
    assert found(before + "from hpcomm import nccl_variables\n", **given) == expected


def test_what_the_program_sets_late_is_not_believed() -> None:
    late = "import os; os.environ['NCCL_LAUNCH_ORDER_IMPLICIT'] = '1'\n"
    assert found(_CUDA_IN_USE + late + "from hpcomm import nccl_variables\n") == ["False", "1"]
    assert found(late + "from hpcomm import nccl_variables\n") == ["True", "1"]


def test_an_old_driver_is_not_asked_for_the_order() -> None:
    """NCCL would let each kernel wait for the end of the one before it."""
    program = _OLD_DRIVER + "from hpcomm import nccl_variables\nassert nccl_variables.driver_version() == 12020\n"
    assert found(program) == ["False", "0"]
    assert found(program, NCCL_LAUNCH_ORDER_IMPLICIT="1") == ["True", "1"]  # the user's


def test_who_asks_an_old_driver_for_the_order_is_told() -> None:
    program = textwrap.dedent(_OLD_DRIVER) + "from hpcomm import nccl_variables\n"
    for wish, warns in (("1", True), ("0", False)):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NCCL_LAUNCH_ORDER_IMPLICIT": wish}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert ("a driver for CUDA 12.2 NCCL runs its kernels one after the other" in done.stderr) == warns


def test_to_import_hpcomm_is_enough() -> None:
    assert found("import hpcomm\nfrom hpcomm import nccl_variables\n") == ["True", "1"]


def test_what_the_user_has_set_stays() -> None:
    program = "import hpcomm\nfrom hpcomm import nccl_variables\nimport os\n"
    program += "print(os.environ['NCCL_LAUNCH_RACE_FATAL'], os.environ['NCCL_GRAPH_REGISTER'])\n"
    assert found(program) == ["0", "0", "True", "1"]
    assert found(program, NCCL_LAUNCH_RACE_FATAL="1", NCCL_GRAPH_REGISTER="1") == ["1", "1", "True", "1"]
