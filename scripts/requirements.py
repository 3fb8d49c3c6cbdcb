"""Prints a dependency list of pyproject.toml for `pip install -r`: "build", or the name of an extra."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip brings the same parser along, and is there before anything else is
    from pip._vendor import tomli as tomllib


def requirements(name: str) -> list[str]:
    """The list called `name`."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    if name == "build":
        return project["build-system"]["requires"]
    return project["project"]["optional-dependencies"][name]


print("\n".join(requirements(sys.argv[1])))
