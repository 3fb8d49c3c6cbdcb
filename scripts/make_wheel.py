"""Makes a source archive and, from that archive, a wheel for the torch of this environment; checks and tries the wheel.

    python scripts/make_wheel.py              # tried in an environment of its own, with the same torch
    python scripts/make_wheel.py --try-here   # tried in this environment, where it is installed for that

Both end up in dist/. USE_CUDA, TORCH_CUDA_ARCH_LIST and the rest are read by setup.py. What follows `--` goes to the
pip that installs torch into the other environment.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import kernel_report

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
DIST = ROOT / "dist"
SOURCE = ROOT / "build/source"  # the archive, unpacked: always the same folder, so that a second build is incremental
OTHER = ROOT / "build/wheel-venv"


def say(text: str) -> None:
    """A heading in the output."""
    print(f"== {text}", flush=True)


def run(*command: str | Path, **environment: str) -> None:
    """Runs a step, from a folder where no hpcomm lies; its own output says what went wrong."""
    words = [str(word) for word in command]
    try:
        subprocess.run(words, check=True, cwd=SCRIPTS, env={**os.environ, **environment})
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"make_wheel: {shlex.join(words[:4])} ... failed with {error.returncode}, see above."
        ) from None


def pip(python: Path | str, *arguments: str | Path) -> None:
    """Runs an environment's pip."""
    run(python, "-m", "pip", "--disable-pip-version-check", *arguments)


def make_source() -> Path:
    """dist/hpcomm-VERSION.tar.gz, unpacked into SOURCE; the folder in it."""
    say("source archive")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist", "--formats=gztar", "--dist-dir", str(DIST)],
        check=True,
        cwd=ROOT,
    )
    archive = newest("hpcomm-*.tar.gz")
    shutil.rmtree(SOURCE, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(SOURCE, filter="data") if hasattr(tarfile, "data_filter") else files.extractall(SOURCE)
    print(archive.relative_to(ROOT))
    return next(SOURCE.iterdir())


def newest(pattern: str) -> Path:
    """What was put into dist/ last."""
    return max(DIST.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def torch_version() -> str:
    """That of this environment."""
    code = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def make_wheel(source: Path, torch: str) -> Path:
    """dist/hpcomm-....whl; objects are kept in build/ for the next time."""
    say(f"wheel for torch {torch}")
    folder = ROOT / f"build/wheel-{sys.implementation.cache_tag}-torch-{torch}"
    options = ["--no-build-isolation", "--no-deps", "--verbose", "--wheel-dir", DIST]
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *options, source),
        HPCOMM_BUILD_DIR=str(folder),
    )
    for log in (folder / "ptxas").glob("*.log"):  # in builds with CUDA
        if spills := kernel_report.spilled(log.read_text()):
            raise SystemExit("make_wheel: " + "; ".join(spills))
    return newest("hpcomm-*.whl")


def other_environment(torch: str, pip_options: list[str]) -> Path:
    """Python of an environment with this torch and nothing of ours; kept as long as torch stays the same."""
    python, made = OTHER / "bin/python", OTHER / f".made-torch-{torch}"
    if not made.exists():
        say(f"an environment with torch {torch}")
        venv.create(OTHER, with_pip=True, clear=True)
        pip(python, "install", *pip_options, f"torch=={torch}")
        made.touch()
    return python


def main() -> None:
    """Makes both, checks and tries."""
    parser = argparse.ArgumentParser(description="Makes a source archive and a wheel; checks and tries the wheel.")
    parser.add_argument("--try-here", action="store_true", help="install the wheel into this environment")
    parser.add_argument("--ranks", type=int, default=1, help="try it under torchrun as well, with so many ranks")
    parser.add_argument("pip_options", nargs="*", help="for the pip that installs torch, after --")
    chosen = parser.parse_args()
    DIST.mkdir(exist_ok=True)
    torch = torch_version()
    wheel = make_wheel(make_source(), torch)
    say("what is in it")
    run(sys.executable, SCRIPTS / "check_wheel.py", wheel)
    python = Path(sys.executable) if chosen.try_here else other_environment(torch, chosen.pip_options)
    say("try it")
    pip(python, "install", "--quiet", "--force-reinstall", "--no-deps", wheel)
    pip(python, "check")  # what the wheel requires is there: the torch that it was built for
    wish = {"0": ["--cuda", "0"], "1": ["--cuda", "1"]}.get(os.environ.get("USE_CUDA", ""), [])
    run(python, "-I", SCRIPTS / "smoke.py", *wish)
    if chosen.ranks > 1:
        run(
            *(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(chosen.ranks)),
            *(SCRIPTS / "smoke.py", *wish),
            OMP_NUM_THREADS="1",
        )
    print(f"{wheel.relative_to(ROOT)} is ready.")


main()
