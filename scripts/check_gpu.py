"""Says what a machine has for the GPU half, and in plain words what it lacks; `make gpu-test` asks first.

    python3 scripts/check_gpu.py [--json FILE]

GPU_NCCL names an NCCL that is put before torch's, so that several ranks can share one GPU. Exit code 1 when something
is missing that the tests cannot do without. Nothing is installed, built or changed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

OLDEST_PYTHON = (3, 10)
SHARES_A_GPU = (2, 30, 3)  # the first NCCL that lets several ranks use one GPU
# What torch itself may do without: to build, to run the benchmarks, to run the tests.
MODULES = {
    "build": ("setuptools",),
    "bench": ("setuptools",),  # which builds
    "test": ("setuptools", "pytest", "hypothesis"),
}


def run(*command: str) -> str:
    """What a program prints, empty when it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def find_program(name: str) -> str:
    """Beside this Python first, where pip puts programs; then on PATH; nvcc also where the toolkit is put."""
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    if name == "nvcc":
        homes = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
        places = [f"{home}/bin" for home in homes if home] + places + ["/usr/local/cuda/bin"]
    return shutil.which(name, path=os.pathsep.join(places)) or ""


def nccl_version(library: str) -> tuple[int, int, int] | None:
    """What a libnccl.so.2 says it is; None when it cannot be loaded."""
    program = (
        "import ctypes, sys; number = ctypes.c_int(); "
        "assert ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)) == 0; print(number.value)"
    )
    answer = run(sys.executable, "-c", program, library)  # in a process of its own: a bad library may take it down
    if not answer.isdigit():
        return None
    number = int(answer)
    return number // 10_000, number // 100 % 100, number % 100


def torch_facts() -> dict[str, Any]:
    """Of the torch that is installed, and the GPUs that it sees. Initialises CUDA: call it in a process that ends."""
    import torch

    facts: dict[str, Any] = {"torch": str(torch.__version__), "torch_cuda": torch.version.cuda or "", "gpus": []}
    if not torch.cuda.is_available():
        return facts
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts["gpus"].append(
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory_gib": round(gpu.total_memory / 2**30, 1),
                "multiprocessors": gpu.multi_processor_count,
            }
        )
    return facts


def loaded_nccl() -> str:
    """The NCCL that torch's processes have, as "2.28.9"; empty without one."""
    try:
        number = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def environment_for_ranks(gpu_nccl: str) -> dict[str, str]:
    """What several ranks on one GPU need in their environment; empty without an NCCL that can."""
    if not gpu_nccl:
        return {}
    preload = os.pathsep.join(filter(None, [str(Path(gpu_nccl).resolve()), os.environ.get("LD_PRELOAD", "")]))
    return {
        "LD_PRELOAD": preload,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "4",
    }


def facts() -> dict[str, Any]:
    """Everything that a report has to name."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": cpu_name(),
        "programs": {name: find_program(name) for name in ("nvcc", "cmake", "ninja", "git")},
        "modules": {name: importlib.util.find_spec(name) is not None for name in MODULES["test"]},
        "python_header": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
        "compiler": (run(os.environ.get("CXX", "c++").split()[0], "--version").splitlines() or [""])[0],
        "driver": (run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines() or [""])[0],
        "gpu_nccl": str(Path(os.environ["GPU_NCCL"]).resolve()) if os.environ.get("GPU_NCCL") else "",
        "gpu_nccl_version": "",
    }
    release = re.search(r"\brelease (\d+\.\d+)", run(found["programs"]["nvcc"] or "nvcc", "--version"))
    found["nvcc"] = release[1] if release else ""
    if found["gpu_nccl"]:
        version = nccl_version(found["gpu_nccl"])
        found["gpu_nccl_version"] = ".".join(map(str, version)) if version else ""
    # With the environment that the ranks will have: the NCCL that they load is what counts.
    ranks = {**os.environ, **(environment_for_ranks(found["gpu_nccl"]) if found["gpu_nccl_version"] else {})}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--torch"], capture_output=True, text=True, timeout=120, check=False, env=ranks
        )
        found |= json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        found |= {"torch": "", "torch_cuda": "", "gpus": [], "nccl": ""}
    return found


def cpu_name() -> str:
    """From the kernel, where it says."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor()


def missing(found: dict[str, Any], what: str = "test", *, builds: bool = True) -> list[str]:
    """What the GPU half cannot do without for ``make gpu-<what>``, each with what to do about it.

    Args:
        builds: False where the module was built elsewhere, and nothing that builds it is needed.
    """
    lacks = []
    if tuple(int(part) for part in found["python"].split(".")[:2]) < OLDEST_PYTHON:
        lacks.append(f"Python 3.10 or newer: {found['executable']} is {found['python']}; use make PYTHON=...")
    if not found["torch"]:
        lacks.append(f"torch: {found['executable']} cannot import it; use make PYTHON=... with one that can")
    elif not found["torch_cuda"]:
        lacks.append(f"a torch with CUDA: {found['torch']} is a build for CPUs")
    elif not found["gpus"]:
        driver = f"the driver is {found['driver']}" if found["driver"] else "nvidia-smi finds no driver"
        lacks.append(f"a GPU: torch {found['torch']} sees none here ({driver})")
    if builds:
        lacks += missing_to_build(found)
    needed = MODULES[what] if builds else [name for name in MODULES[what] if name not in MODULES["build"]]
    lacks += [f"the Python module {name}" for name in needed if not found["modules"][name]]
    if found["gpu_nccl"] and not found["gpu_nccl_version"]:
        lacks.append(f"an NCCL: GPU_NCCL={found['gpu_nccl']} is not a library that can be loaded")
    elif found["gpu_nccl"] and tuple(map(int, found["gpu_nccl_version"].split("."))) < SHARES_A_GPU:
        lacks.append(
            f"an NCCL that lets ranks share a GPU (2.30.3 or newer): GPU_NCCL is {found['gpu_nccl_version']}; "
            "leave it away to run what one rank can"
        )
    return lacks


def missing_to_build(found: dict[str, Any]) -> list[str]:
    """What the build needs."""
    lacks = []
    if not found["programs"]["nvcc"]:
        lacks.append("nvcc, the compiler of the CUDA toolkit: set CUDA_HOME or PATH")
    elif found["torch_cuda"] and found["nvcc"].split(".")[0] != found["torch_cuda"].split(".")[0]:
        lacks.append(f"a toolkit of CUDA {found['torch_cuda']}, which torch is built with: nvcc is {found['nvcc']}")
    lacks += [f"{name}: not beside {found['executable']} and not on PATH" for name in ("cmake", "ninja")
              if not found["programs"][name]]  # fmt: skip
    if not found["compiler"]:
        lacks.append(f"a C++ compiler: {os.environ.get('CXX', 'c++')} does not run")
    if not found["python_header"]:
        lacks.append(f"Python.h: {found['executable']} has no headers (python3-dev, python3.12-dev or the like)")
    return lacks


def most_ranks(found: dict[str, Any]) -> int:
    """How many ranks the tests and benchmarks may use: one per GPU, or two on one where NCCL can."""
    if len(found["gpus"]) >= 2:
        return 2
    return 2 if found["gpus"] and found["gpu_nccl_version"] else len(found["gpus"])


def describe(found: dict[str, Any]) -> str:
    """The same for people."""
    gpus = ", ".join(f"{gpu['name']} (sm_{gpu['capability'].replace('.', '')}, {gpu['memory_gib']} GiB)"
                     for gpu in found["gpus"])  # fmt: skip
    rows = {
        "GPU": gpus or "none",
        "driver": found["driver"] or "none",
        "torch": f"{found['torch'] or 'none'}, CUDA {found['torch_cuda'] or 'none'}",
        "nvcc": f"{found['nvcc'] or 'none'} {found['programs']['nvcc']}",
        "NCCL": found.get("nccl") or "none",
        "GPU_NCCL": f"{found['gpu_nccl']} {found['gpu_nccl_version']}".strip() or "not set",
        "ranks": {
            0: "none",
            1: "one: no second GPU, and no GPU_NCCL=/path/to/libnccl.so.2 (2.30.3 or newer) that lets two share one",
            2: "two" + (" on one GPU" if len(found["gpus"]) == 1 else ", a GPU each"),
        }[most_ranks(found)],
        "compiler": found["compiler"] or "none",
        "cmake, ninja": f"{found['programs']['cmake'] or 'none'}, {found['programs']['ninja'] or 'none'}",
        "Python": f"{found['python']} {found['executable']}",
        "machine": f"{found['cpu']}, {found['cores']} cores, {found['system']}",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in rows.items())


def complain(lacks: list[str]) -> str:
    """What `make` prints before it stops."""
    return "The GPU half cannot be checked on this machine. It lacks:\n" + "\n".join(f"  - {item}" for item in lacks)


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the facts there")
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.torch:
        print(json.dumps({**torch_facts(), "nccl": loaded_nccl()}))
        return 0
    found = facts()
    lacks = missing(found)
    print(describe(found))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**found, "missing": lacks}, indent=1) + "\n")
    if lacks:
        print("\n" + complain(lacks), file=sys.stderr)
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main())
