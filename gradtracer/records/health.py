"""The health of a gradient by its norm."""

from __future__ import annotations

import math
from enum import Enum

from pydantic import Field, model_validator

from gradtracer.records.base import Record


class GradientHealth(str, Enum):
    """Where a gradient norm lies between too small to learn and too large to be stable."""

    HEALTHY = "healthy"
    VANISHING = "vanishing"
    SATURATED = "saturated"
    EXPLODING = "exploding"
    NON_FINITE = "non_finite"


class GradientThresholds(Record):
    """Bounds between the states of `GradientHealth`; a norm that lies on one belongs to the milder state.

    The defaults are absolute, so they say something only where the loss has unit scale: a sum-reduced loss reads as
    saturated while nothing is wrong. A state alone is therefore an `info` event.
    """

    vanishing: float = Field(default=1e-6, gt=0, description="Below this norm a gradient is vanishing.")
    saturated: float = Field(default=1.0, gt=0, description="Above this norm a gradient is saturated.")
    exploding: float = Field(default=1e3, gt=0, description="Above this norm a gradient is exploding.")

    @model_validator(mode="after")
    def _in_order(self) -> GradientThresholds:
        if not self.vanishing < self.saturated < self.exploding:
            raise ValueError(
                "expected vanishing < saturated < exploding, "
                f"got {self.vanishing:g}, {self.saturated:g}, {self.exploding:g}"
            )
        return self

    def classify(self, norm: float) -> GradientHealth:
        """The state of a gradient with this norm.

        Args:
            norm: Euclidean norm of the gradient; NaN and infinity are states too.
        """
        if not math.isfinite(norm):
            return GradientHealth.NON_FINITE
        if norm < self.vanishing:
            return GradientHealth.VANISHING
        if norm <= self.saturated:
            return GradientHealth.HEALTHY
        if norm <= self.exploding:
            return GradientHealth.SATURATED
        return GradientHealth.EXPLODING
