"""Builds hpcomm under one torch after the other, and tries each build with two ranks.

    python scripts/compat.py 2.11.0 2.12.1 2.13.0

Each torch gets an environment that is removed afterwards (gigabytes), a source archive, a wheel from it, and
scripts/smoke.py, alone and under torchrun. PIP_ARGS goes to the pip that installs torch. Prints a table; exits with 1
when a version failed. A version that the package index does not have is reported and is no failure.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build/compat"
NOT_THERE = "No matching distribution found for torch=="


def call(log: Path, *command: str | Path) -> str:
    """Runs a command with its output in a log; what it printed when it failed, else empty."""
    with log.open("w") as file:
        done = subprocess.run(
            [str(word) for word in command], stdout=file, stderr=subprocess.STDOUT, check=False, cwd=ROOT
        )
    return log.read_text() if done.returncode else ""


def attempt(version: str) -> str:
    """One version, start to end: "passed ..." or what went wrong."""
    environment = PLACE / "venv"
    python = environment / "bin/python"
    venv.create(environment, with_pip=True, clear=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir"]
    wanted = subprocess.run(
        [sys.executable, str(ROOT / "scripts/requirements.py"), "build"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    options = shlex.split(os.environ.get("PIP_ARGS", ""))
    log = PLACE / f"{version}-install.log"
    said = call(log, *pip, *options, f"torch=={version}") or call(log, *pip, *filter(None, wanted))
    if said:
        return "not in this package index" if NOT_THERE in said else f"installation failed, see {log}"
    log = PLACE / f"{version}-build.log"
    if call(log, python, ROOT / "scripts/make_wheel.py", "--try-here", "--ranks", "2"):
        return f"FAILED, see {log}"
    about = "import torch; print(torch.__version__)"
    installed = subprocess.run([str(python), "-W", "ignore", "-c", about], capture_output=True, text=True, check=True)
    built = "CUDA" if "smoke: CUDA half: yes" in log.read_text() else "CPU"
    return f"passed ({built} build, torch {installed.stdout.strip()}, 1 and 2 ranks)"


def main() -> None:
    """Every version that the command line names, one environment at a time."""
    PLACE.mkdir(parents=True, exist_ok=True)
    results = {}
    for version in sys.argv[1:]:
        start = time.monotonic()
        try:
            results[version] = attempt(version)
        finally:
            shutil.rmtree(PLACE / "venv", ignore_errors=True)
        print(f"torch {version:8} {results[version]} [{time.monotonic() - start:.0f} s]", flush=True)
    sys.exit(any("failed" in result.lower() for result in results.values()))


main()
