"""The command line: ``hpcomm ...``, also ``python -m hpcomm ...``. Each subject adds its own commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hpcomm import doctor
from hpcomm.errors import DeadlockError
from hpcomm.plan.files import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 when the answer is no, 2 when the question was wrong."""
    parser = argparse.ArgumentParser(prog="hpcomm", description="Communication plans for hybrid-parallel training.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor.add_to(commands)
    try:
        from hpcomm import report
        from hpcomm.plan import command as plan_command

        plan_command.add_to(commands)
        report.add_to(commands)
    except ImportError as error:  # the native module: the doctor works without it, and says more
        if list(sys.argv[1:] if arguments is None else arguments)[:1] != ["doctor"]:
            say(f"hpcomm: {error}")
            return 2
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        if sys.stdout is not None:  # `>&-`
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`: whoever reads has seen enough
        if sys.stderr is not None:
            sys.stderr.close()
        return 0
    except DeadlockError as error:  # of a table that cannot be compiled: an answer, not a mistake in the question
        print(f"rejected: {error}")
        return 1
    except (OSError, ValueError) as error:
        say(f"hpcomm: {error}")
        return 2
    return status
