"""Decides whether a build includes the CUDA half, with which nvcc, and for which GPUs; setup.py asks.

As a program it prints the path of nvcc, or nothing where there is none.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Compute capabilities that are compiled when nobody names any: A100, H100 and H200, B200.
DEFAULT = ("8.0", "9.0", "10.0")

# The names that torch takes in TORCH_CUDA_ARCH_LIST, for the generations that nvcc 12 and later may know.
NAMED = {
    "Volta": "7.0+PTX",
    "Volta+Tegra": "7.2",
    "Turing": "7.5+PTX",
    "Ampere": "8.0 8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0 10.3 12.0 12.1+PTX",
    "Blackwell+Tegra": "11.0",
}

# The first that passes a kernel the 32,764 bytes of parameters that csrc/pack/pack_cuda.cu takes; 12.0 compiles C++20.
OLDEST_NVCC = (12, 1)


class BuildRefused(SystemExit):
    """Ends the build with a message for the person who started it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"hpcomm: {message}")


@dataclass(frozen=True)
class Found:
    """What the machine has; empty strings for what it lacks."""

    torch: str  # torch.__version__
    torch_cuda: str  # torch.version.cuda
    nvcc: str  # path of the compiler
    nvcc_release: str  # "13.0"


@dataclass(frozen=True)
class Choice:
    """Whether the CUDA half is built, and why not."""

    on: bool
    why_not: str = ""


def read_wish(value: str) -> str:
    """USE_CUDA as "auto", "0" or "1"."""
    wish = value.strip().lower() or "auto"
    wish = {"off": "0", "on": "1"}.get(wish, wish)
    if wish not in {"auto", "0", "1"}:
        raise BuildRefused(f"USE_CUDA={value}: use auto, 0 or 1.")
    return wish


def choose(wish: str, found: Found) -> Choice:
    """USE_CUDA=auto takes the CUDA half where everything for it is there; 1 refuses to go on without.

    Raises:
        BuildRefused: ``wish`` is "1" and something is missing; the message says what.
    """
    if wish == "0":
        return Choice(on=False, why_not="USE_CUDA=0")
    missing = lack(found)
    if not missing:
        return Choice(on=True)
    if wish == "1":
        raise BuildRefused(f"USE_CUDA=1, but {missing}.")
    return Choice(on=False, why_not=missing)


def lack(found: Found) -> str:
    """What keeps the CUDA half from being built, empty when nothing does."""
    if not found.torch_cuda:
        return f"the torch that is installed ({found.torch}) is a build without CUDA"
    if not found.nvcc:
        return f"there is no nvcc: install the CUDA toolkit {major(found.torch_cuda)}.x and set CUDA_HOME or PATH"
    if not found.nvcc_release:
        return f"{found.nvcc} does not say its version; does it run?"
    if major(found.nvcc_release) != major(found.torch_cuda):
        return (
            f"torch {found.torch} is built with CUDA {found.torch_cuda} and {found.nvcc} is CUDA {found.nvcc_release}: "
            f"the major versions have to be equal"
        )
    if tuple(int(part) for part in found.nvcc_release.split(".")) < OLDEST_NVCC:
        return f"{found.nvcc} is CUDA {found.nvcc_release}, older than {'.'.join(map(str, OLDEST_NVCC))}"
    return ""


def major(version: str) -> str:
    """13 of "13.0"."""
    return version.split(".", maxsplit=1)[0]


def minor(version: str) -> str:
    """2.13 of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def local_version(torch: str, cuda: str) -> str:
    """What tells the builds of one version apart: "cu130.torch2.11", or "cpu.torch2.13" where ``cuda`` is empty."""
    return f"{'cu' + cuda.replace('.', '') if cuda else 'cpu'}.torch{minor(torch)}"


def nvcc_release(text: str) -> str:
    """The "13.0" in what `nvcc --version` prints, empty when it is not there."""
    match = re.search(r"\brelease (\d+\.\d+)", text)
    return match[1] if match else ""


def find_nvcc(environment: Mapping[str, str], default: str = "/usr/local/cuda") -> str:
    """Path of nvcc, empty when there is none. CUDA_HOME and CUDA_PATH decide alone where they are set."""
    named = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    if named:
        return shutil.which(f"{named[0]}/bin/nvcc") or ""
    return shutil.which("nvcc", path=environment.get("PATH")) or shutil.which(f"{default}/bin/nvcc") or ""


# --- Architectures ----------------------------------------------------------------------------------------------------


def known_to(nvcc_list: str) -> list[str]:
    """["8.0", "9.0", ...], in order, from what `nvcc --list-gpu-arch` prints (compute_80 and so on)."""
    numbers = {match[1] for match in re.finditer(r"\bcompute_(\d+)\b", nvcc_list)}
    return [f"{number[:-1]}.{number[-1]}" for number in sorted(numbers, key=int)]


def architectures(wish: str, known: Sequence[str]) -> str:
    """CMAKE_CUDA_ARCHITECTURES for TORCH_CUDA_ARCH_LIST: machine code each, PTX of those marked "+PTX".

    Args:
        wish: "8.0;9.0+PTX", "Ampere Hopper", "9.0a", separated by blanks, commas or semicolons; "native" for the GPUs
            of this machine; empty for DEFAULT, as far as nvcc knows it, and PTX of the newest.
        known: what this nvcc can compile for, oldest first.

    Raises:
        BuildRefused: a name or number that this nvcc does not know.
    """
    items = [item for item in re.split(r"[;,\s]+", wish.strip()) if item]
    if [item.lower() for item in items] == ["native"]:
        return "native"
    if not items:
        items = [item for item in DEFAULT if item in known]
        if not items:
            raise BuildRefused(f"this nvcc compiles for none of {', '.join(DEFAULT)}. Set TORCH_CUDA_ARCH_LIST.")
        items[-1] += "+PTX"

    chosen: dict[str, bool] = {}  # capability -> with PTX
    for item in items:
        for capability, ptx in expand(item, known):
            chosen[capability] = chosen.get(capability, False) or ptx
    return ";".join(
        capability.replace(".", "") + ("" if chosen[capability] else "-real")
        for capability in sorted(chosen, key=order)
    )


def expand(item: str, known: Sequence[str]) -> list[tuple[str, bool]]:
    """One item as (capability, with PTX): a number as it is, a name as far as this nvcc knows its members."""
    name = next((name for name in NAMED if name.lower() == item.lower()), None)
    # "Hopper+PTX" means what "Hopper" means; the "+Tegra" of a name is part of it.
    name = name or next((name for name in NAMED if f"{name}+ptx".lower() == item.lower()), None)
    if name:
        members = [read(member) for member in NAMED[name].split()]
        members = [(capability, ptx) for capability, ptx in members if capability in known]
        if members:
            return members
    elif re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", item, re.IGNORECASE):
        capability, ptx = read(item)
        if capability.rstrip("af") in known:
            return [(capability, ptx)]
    else:
        raise BuildRefused(
            f"TORCH_CUDA_ARCH_LIST has '{item}': expected numbers such as 9.0 or 9.0+PTX, or {', '.join(NAMED)}."
        )
    raise BuildRefused(
        f"TORCH_CUDA_ARCH_LIST has '{item}', which this nvcc does not know. It knows {', '.join(known)}."
    )


def read(item: str) -> tuple[str, bool]:
    """("9.0a", True) from "9.0a+PTX"."""
    capability, _, ptx = item.lower().partition("+")
    return capability, ptx == "ptx"


def order(capability: str) -> tuple[int, str]:
    """9.0 before 9.0a before 10.0."""
    number = capability.rstrip("af")
    return int(number.replace(".", "")), capability.removeprefix(number)


if __name__ == "__main__":
    print(find_nvcc(os.environ))
