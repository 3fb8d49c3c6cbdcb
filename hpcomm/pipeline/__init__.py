"""Pipeline: a model cut into stages, trained by a StepPlan."""

from hpcomm.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
