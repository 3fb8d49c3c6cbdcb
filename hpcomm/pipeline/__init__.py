"""Pipeline: a model cut into stages, trained by a StepPlan."""

from hpcomm.pipeline.chain import Chain
from hpcomm.pipeline.pipeline import Pipeline

__all__ = ["Chain", "Pipeline"]
