"""Pipeline: a model cut into stages, trained by a StepPlan."""

from hpcomm.pipeline.chain import Chain
from hpcomm.pipeline.meta import materialize
from hpcomm.pipeline.partition import Balance, Cut
from hpcomm.pipeline.pipeline import Pipeline

__all__ = ["Balance", "Chain", "Cut", "Pipeline", "materialize"]
