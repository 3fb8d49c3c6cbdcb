"""The channels of Control on which the Python layer talks, each with a number of its own.

Edges, splits and the like take 64-bit hashes of their names; csrc/control/channels.h has the numbers below 16.
"""

from __future__ import annotations

import enum

__all__: list[str] = []


@enum.unique
class ControlChannel(enum.IntEnum):
    """What is said there."""

    AGREE = 16  # do all ranks have the same arguments?
    LINK_COST = 18  # by which buckets are sized
    CUT = 20  # of a model into stages
    MATERIALIZE = 21  # what a model on the meta device was given
    PLAN = 22
    BOARD = 23  # where ranks of a host leave their times
    UNIT = 24  # what losses are divided by
    SEATS = 25  # on which core a rank sits
    REFERENCE = 26  # what one process found
    LEAVING = 27  # nothing more is received here
    OPTIMIZER = 28  # what there is of a divided optimizer's state
    DOCTOR = 29  # what each rank has found
    BUFFERS = 30  # which are not saved, and of which kind
    FOUND_OUT = 31  # behind an exchange in which all have found the same error
    WRAPPER = 32768  # what its ranks have alike: the first of as many, one for each
    BUCKET_ORDER = 65536  # of a wrapper: as many again
