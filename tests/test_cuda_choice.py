"""Which builds get the CUDA half and for which GPUs, what a build is called, and what a wheel may contain."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import check_wheel  # noqa: E402
import cuda_choice  # noqa: E402
import kernel_report  # noqa: E402
from cuda_choice import BuildRefused, Found  # noqa: E402

KNOWN_13 = ["7.5", "8.0", "8.6", "8.7", "8.8", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]
KNOWN_12_4 = ["5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0"]

COMPLETE = Found(torch="2.11.0+cu130", torch_cuda="13.0", nvcc="/cuda/bin/nvcc", nvcc_release="13.1")
NO_CUDA_TORCH = Found(torch="2.13.0+cpu", torch_cuda="", nvcc="/cuda/bin/nvcc", nvcc_release="13.0")
NO_NVCC = Found(torch="2.11.0+cu130", torch_cuda="13.0", nvcc="", nvcc_release="")
DEAF_NVCC = Found(torch="2.11.0+cu130", torch_cuda="13.0", nvcc="/cuda/bin/nvcc", nvcc_release="")
OTHER_MAJOR = Found(torch="2.11.0+cu130", torch_cuda="13.0", nvcc="/cuda/bin/nvcc", nvcc_release="12.8")
OLD = Found(torch="2.11.0+cu126", torch_cuda="12.6", nvcc="/cuda/bin/nvcc", nvcc_release="12.0")
OLDEST = Found(torch="2.11.0+cu126", torch_cuda="12.6", nvcc="/cuda/bin/nvcc", nvcc_release="12.1")

LACKS = [
    (NO_CUDA_TORCH, "the torch that is installed (2.13.0+cpu) is a build without CUDA"),
    (NO_NVCC, "there is no nvcc: install the CUDA toolkit 13.x and set CUDA_HOME or PATH"),
    (DEAF_NVCC, "/cuda/bin/nvcc does not say its version; does it run?"),
    (
        OTHER_MAJOR,
        "torch 2.11.0+cu130 is built with CUDA 13.0 and /cuda/bin/nvcc is CUDA 12.8: "
        "the major versions have to be equal",
    ),
    (OLD, "/cuda/bin/nvcc is CUDA 12.0, older than 12.1"),
]


# --- USE_CUDA ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wish"),
    [("", "auto"), ("auto", "auto"), ("AUTO", "auto"), ("0", "0"), ("off", "0"), ("1", "1"), (" On ", "1")],
)
def test_use_cuda(value: str, wish: str) -> None:
    assert cuda_choice.read_wish(value) == wish


def test_use_cuda_takes_nothing_else() -> None:
    with pytest.raises(BuildRefused, match="USE_CUDA=yes: use auto, 0 or 1"):
        cuda_choice.read_wish("yes")


@pytest.mark.parametrize("found", [COMPLETE, OLDEST])
@pytest.mark.parametrize("wish", ["auto", "1"])
def test_cuda_where_everything_is_there(wish: str, found: Found) -> None:
    assert cuda_choice.choose(wish, found) == cuda_choice.Choice(on=True)


def test_cuda_is_left_out_on_demand() -> None:
    assert not cuda_choice.choose("0", COMPLETE).on


@pytest.mark.parametrize(("found", "lack"), LACKS)
def test_what_is_missing_is_said_in_one_line(found: Found, lack: str) -> None:
    choice = cuda_choice.choose("auto", found)
    assert (choice.on, choice.why_not) == (False, lack)
    with pytest.raises(BuildRefused) as caught:
        cuda_choice.choose("1", found)
    assert str(caught.value) == f"hpcomm: USE_CUDA=1, but {lack}."


# --- nvcc -------------------------------------------------------------------------------------------------------------


def program(path: Path) -> str:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_where_nvcc_is_looked_for(tmp_path: Path) -> None:
    home = program(tmp_path / "home/bin/nvcc")
    on_path = program(tmp_path / "path/nvcc")
    default = program(tmp_path / "default/bin/nvcc")
    folders = {"PATH": str(tmp_path / "path")}

    def found(**environment: str) -> str:
        return cuda_choice.find_nvcc(environment, default=str(tmp_path / "default"))

    assert found(CUDA_HOME=str(tmp_path / "home"), **folders) == home
    assert found(CUDA_PATH=str(tmp_path / "home"), **folders) == home
    assert found(CUDA_HOME="", **folders) == on_path
    assert found(PATH=str(tmp_path)) == default
    # Somebody who names a toolkit does not want another one.
    assert found(CUDA_HOME=str(tmp_path / "nowhere"), **folders) == ""
    assert cuda_choice.find_nvcc({"PATH": str(tmp_path)}, default=str(tmp_path / "nowhere")) == ""


def test_what_nvcc_says() -> None:
    said = "Copyright (c) 2005-2025 NVIDIA Corporation\nCuda compilation tools, release 13.0, V13.0.88\n"
    assert cuda_choice.nvcc_release(said) == "13.0"
    assert cuda_choice.nvcc_release("nvcc: command not found") == ""
    assert cuda_choice.known_to("compute_75\ncompute_80\ncompute_121\ncompute_100\n") == ["7.5", "8.0", "10.0", "12.1"]


# --- TORCH_CUDA_ARCH_LIST ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "known", "expected"),
    [
        ("", KNOWN_13, "80-real;90-real;100"),
        ("  ", KNOWN_12_4, "80-real;90"),
        ("8.0;9.0;10.0+PTX", KNOWN_13, "80-real;90-real;100"),
        ("9.0", KNOWN_13, "90-real"),
        ("9.0+PTX 8.0", KNOWN_13, "80-real;90"),
        ("10.0, 9.0;8.0", KNOWN_13, "80-real;90-real;100-real"),
        ("8.0 8.0+PTX", KNOWN_13, "80"),
        ("9.0 9.0a", KNOWN_13, "90-real;90a-real"),
        ("10.0f+ptx", KNOWN_13, "100f"),
        ("Hopper", KNOWN_13, "90"),
        ("ampere;Hopper", KNOWN_13, "80-real;86;90"),
        ("Hopper+PTX", KNOWN_13, "90"),
        ("Ampere+Tegra", KNOWN_13, "87-real"),
        ("Blackwell", KNOWN_13, "100-real;103-real;120-real;121"),
        # The members that an older nvcc knows.
        ("Blackwell", [*KNOWN_12_4, "10.0", "12.0"], "100-real;120-real"),
        ("native", KNOWN_13, "native"),
    ],
)
def test_architectures(wish: str, known: list[str], expected: str) -> None:
    assert cuda_choice.architectures(wish, known) == expected


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("7.0", "'7.0', which this nvcc does not know. It knows 7.5, 8.0,"),
        ("9.0;Volta", "'Volta', which this nvcc does not know"),
        ("sm_90", "'sm_90': expected numbers such as 9.0"),
        ("90", "'90': expected numbers"),
        ("9.0+SASS", r"'9.0\+SASS': expected numbers"),
        ("native 9.0", "'native': expected numbers"),
    ],
)
def test_unknown_architectures_are_refused(wish: str, message: str) -> None:
    with pytest.raises(BuildRefused, match=message):
        cuda_choice.architectures(wish, KNOWN_13)


def test_an_nvcc_without_any_default_is_refused() -> None:
    with pytest.raises(BuildRefused, match="none of 8.0, 9.0, 10.0. Set TORCH_CUDA_ARCH_LIST"):
        cuda_choice.architectures("", ["3.5", "7.0"])


# --- Names and contents of wheels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "cuda", "expected"),
    [
        ("2.11.0+cu130", "13.0", "cu130.torch2.11"),
        ("2.13.0+cpu", "", "cpu.torch2.13"),
        ("2.14.0a0+gitabc", "12.8", "cu128.torch2.14"),
    ],
)
def test_a_build_is_named_after_its_torch(torch: str, cuda: str, expected: str) -> None:
    assert cuda_choice.local_version(torch, cuda) == expected


DYNAMIC = """
 0x0000000000000001 (NEEDED)             Shared library: [libtorch_cpu.so]
 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.13]
 0x000000000000000e (SONAME)             Library soname: [_C.so]
 0x000000000000001d (RUNPATH)            Library runpath: [$ORIGIN/../torch/lib:/home/me/torch/lib]
"""


def test_what_a_module_needs_is_read_from_readelf() -> None:
    assert check_wheel.needed(DYNAMIC) == ["libtorch_cpu.so", "libcudart.so.13"]
    assert check_wheel.search_paths(DYNAMIC) == ["$ORIGIN/../torch/lib", "/home/me/torch/lib"]
    assert check_wheel.wrong_paths(check_wheel.search_paths(DYNAMIC)) == [
        "searches /home/me/torch/lib, not relative to itself"
    ]


@pytest.mark.parametrize(
    ("libraries", "cuda", "complaints"),
    [
        (["libtorch_cpu.so", "libc10.so", "libc.so.6", "ld-linux-x86-64.so.2"], False, []),
        (["libtorch_cpu.so", "libc10_cuda.so", "libcudart.so.13"], True, []),
        (["libtorch_cpu.so"], True, ["does not need libcudart.so"]),
        (["libtorch_cpu.so", "libcudart.so.13"], False, ["needs libcudart.so.13, which is not on the list"]),
        (
            ["libtorch_cpu.so", "libcudart.so.13", "libnccl.so.2"],
            True,
            ["needs libnccl.so.2, which is not on the list"],
        ),
        (["libpython3.11.so.1.0", "libtorch_cpu.so"], False, ["needs libpython3.11.so.1.0, which is not on the list"]),
    ],
)
def test_libraries_of_a_wheel(libraries: list[str], cuda: bool, complaints: list[str]) -> None:
    assert check_wheel.wrong_libraries(libraries, cuda=cuda) == complaints


def test_the_newest_symbols_win_by_number() -> None:
    versions = "Name: GLIBC_2.9  Flags: none\n Name: GLIBC_2.34 Flags\n Name: GLIBC_2.2.5 F\n Name: GLIBCXX_3.4.30 F"
    assert check_wheel.newest_symbols(versions) == {"GLIBC": "2.34", "GLIBCXX": "3.4.30"}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("hpcomm-0.1.0+cu130.torch2.11-cp311-cp311-linux_x86_64.whl", True),
        ("hpcomm-0.1.0+cpu.torch2.13-cp311-cp311-linux_x86_64.whl", True),
        ("hpcomm-0.1.0-cp311-cp311-linux_x86_64.whl", False),
        ("hpcomm-0.1.0+cpu.torch2.13-py3-none-any.whl", False),
        ("hpcomm-0.1.0+cu130.torch2.11-cp312-cp312-linux_x86_64.whl", False),
    ],
)
def test_names_of_wheels(name: str, right: bool) -> None:
    assert (check_wheel.wrong_name(name, "cp311-cp311-linux_x86_64") == []) is right


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("hpcomm/_C.cpython-311-x86_64-linux-gnu.so", True),
        ("hpcomm/plan/compile.py", True),
        ("hpcomm/_C.pyi", True),
        ("hpcomm/py.typed", True),
        ("hpcomm-0.1.0+cpu.torch2.13.dist-info/METADATA", True),
        ("hpcomm.libs/libnccl.so.2", False),
        ("hpcomm/lib/libcudart.so", False),
        ("tests/test_tree.py", False),
    ],
)
def test_files_of_a_wheel(name: str, right: bool) -> None:
    assert (check_wheel.FILES.fullmatch(name) is not None) is right


def test_folders_of_the_build_are_found_in_binaries() -> None:
    assert check_wheel.traces(b"\0/home/me/hpcomm/csrc/a.cpp\0", ["/home/me/hpcomm", "/opt"]) == ["/home/me/hpcomm"]


# --- What ptxas says --------------------------------------------------------------------------------------------------


def ptxas(chip: int, tasks: int, registers: int, stores: int, loads: int) -> str:
    """Its words for one kernel."""
    name = f"_ZN6hpcomm45_GLOBAL__N__932e0211_12_pack_cuda_cu_3c8c7ee011copy_kernelILj{tasks}EEEvNS0_9TaskTableIXT_EEE"
    return f"""ptxas info    : Compiling entry function '{name}' for 'sm_{chip}'
ptxas info    : Function properties for {name}
    {stores} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 0 barriers, 4448 bytes cmem[0], 8 bytes cmem[2]
"""


def test_kernels_that_spill_are_named() -> None:
    clean = ptxas(80, 1022, 64, 0, 0) + ptxas(90, 127, 64, 0, 0)
    assert kernel_report.rows(80, ptxas(80, 1022, 64, 0, 0)) == [
        ("sm_80", "copy_kernel, 1022 tasks", "64", "0", "0", "0")
    ]
    assert kernel_report.spilled(clean) == []
    assert kernel_report.spilled(clean + ptxas(100, 127, 64, 76, 80)) == [
        "copy_kernel, 127 tasks for sm_100 spills: 76 bytes stored, 80 loaded"
    ]
