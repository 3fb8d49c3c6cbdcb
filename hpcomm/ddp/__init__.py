"""DistributedDataParallel: torch's wrapper with hpcomm's reduction under it."""

from __future__ import annotations

from hpcomm.ddp.attached import attach as attach
from hpcomm.ddp.module import describe_parameters as describe_parameters
from hpcomm.ddp.module import require_mesh as require_mesh
from hpcomm.ddp.wrapper import DistributedDataParallel as DistributedDataParallel

__all__: list[str] = []
