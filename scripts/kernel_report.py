"""Compiles the CUDA kernels for each architecture and prints a Markdown table of what ptxas says about them.

Usage: python scripts/kernel_report.py [--architectures 80 90 100]. Needs nvcc on PATH and no GPU; minutes, since every
cast is compiled for every architecture. The table is the one of docs/explanation/gpu-kernels.md.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "csrc/pack/pack_cuda.cu"

# Names in the table, and how to find them in a mangled name: a template argument of N tasks is written LjN.
KERNELS = (("copy_kernel", r"copy_kernelILj(\d+)E"), ("finish_loss_kernel", r"finish_loss_kernel"))


def compile_for(nvcc: str, architecture: int) -> str:
    """What ptxas prints about the kernels, in order."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++20", "-O3", "-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
        command += ["-Icsrc", "-Xptxas", "-v", "-c", str(SOURCE), "-o", f"{folder}/kernels.o"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def rows(architecture: int, report: str) -> list[tuple[str, ...]]:
    """One line of the table for each kernel in the report of ptxas."""
    table = []
    for entry in report.split("Compiling entry function ")[1:]:
        name = "unknown"
        for plain, pattern in KERNELS:
            if found := re.search(pattern, entry):
                name = f"{plain}, {found[1]} tasks" if found.groups() else plain
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        shared = re.search(r"(\d+) bytes smem", entry)
        if spills is None or registers is None:
            raise SystemExit(f"ptxas has changed its words: {entry}")
        table.append((f"sm_{architecture}", name, registers[1], shared[1] if shared else "0", spills[1], spills[2]))
    return sorted(table)


def spilled(report: str) -> list[str]:
    """The kernels in a log of ptxas that keep registers in memory, each with how many bytes; empty is good."""
    found = []
    for entry in report.split("Compiling entry function ")[1:]:
        architecture = re.search(r"for 'sm_(\d+)", entry)
        ((chip, name, _, _, stores, loads),) = rows(
            int(architecture[1]) if architecture else 0, f"Compiling entry function {entry}"
        )
        if (stores, loads) != ("0", "0"):
            found.append(f"{name} for {chip} spills: {stores} bytes stored, {loads} loaded")
    return found


def main() -> None:
    """The table, then the release of nvcc."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90, 100])
    arguments = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("nvcc is not on PATH: install the CUDA toolkit")
    print("| architecture | kernel | registers | shared memory | spill stores, bytes | spill loads, bytes |")
    print("|---|---|---|---|---|---|")
    for architecture in arguments.architectures:
        for row in rows(architecture, compile_for(nvcc, architecture)):
            print("| " + " | ".join(row) + " |")
        sys.stdout.flush()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    print(f"\n{re.findall(r'release .*', version)[-1]}")


if __name__ == "__main__":
    main()
