"""Observations: facts about a run that are no number per step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gradtracer.records.base import Name, Record, Text
from gradtracer.records.event import Measure, Severity
from gradtracer.records.fix import ParameterValue
from gradtracer.records.hypothesis import SourceLocation


class LayerInfo(Record):
    """One module that holds parameters or transforms activations."""

    name: Name = Field(description="Module path; `(root)` for the model itself.")
    type: Name = Field(description="Class name of the module.")
    num_parameters: int = Field(ge=0, description="Parameters that it holds itself, not through children.")
    trainable: bool = Field(description="Whether any of them requires a gradient.")
    in_optimizer: bool = Field(description="Whether an optimizer holds all its trainable parameters.")
    fed_by: Name | None = Field(default=None, description="The layer whose output is its input, where that was seen.")
    source: SourceLocation | None = Field(
        default=None, description="Where the class of the module that owns it stands."
    )


class ModelDescription(Record):
    """The model's layers, in forward order where a forward pass was seen, else in order of registration."""

    kind: Literal["model"] = "model"
    step: int = Field(ge=0)
    type: Name
    num_parameters: int = Field(ge=0)
    num_bytes: int = Field(ge=0)
    forward_order_known: bool = False
    layers: tuple[LayerInfo, ...]
    source: SourceLocation | None = Field(default=None, description="Where the model's class stands.")
    loss_source: SourceLocation | None = Field(
        default=None, description="Where the loss is computed; null where there are several, or where it is not known."
    )


class OptimizerGroup(Record):
    """One parameter group."""

    num_parameters: int = Field(ge=0)
    hyperparameters: tuple[ParameterValue, ...]


class OptimizerDescription(Record):
    """An optimizer, and the parameters that it should hold and does not."""

    kind: Literal["optimizer"] = "optimizer"
    step: int = Field(ge=0)
    type: Name
    groups: tuple[OptimizerGroup, ...]
    missing: tuple[Name, ...] = Field(
        default=(), description="Names of parameters that have a gradient and that no optimizer holds."
    )
    num_foreign: int = Field(default=0, ge=0, description="Parameters that it holds and the model does not.")
    source: SourceLocation | None = Field(default=None, description="Where it was built, where that is known.")


class NonFiniteOrigin(Record):
    """Where a NaN or infinity was first seen."""

    kind: Literal["non_finite_origin"] = "non_finite_origin"
    step: int = Field(ge=0)
    where: Literal["data", "weight", "forward", "loss", "backward"] = Field(
        description="data: in the batch; weight: in a parameter before the forward pass; forward: in an activation; "
        "loss: in the loss expression; backward: in a gradient while the loss is finite."
    )
    layer: Name | None = None
    operation: Name | None = Field(default=None, description="Autograd node at which it was seen, e.g. `LogBackward0`.")
    num_non_finite: int = Field(default=0, ge=0)
    source: SourceLocation | None = None
    detail: Text = ""


class AuditFinding(Record):
    """A fact that an audit found, told once per code and layer."""

    kind: Literal["audit"] = "audit"
    step: int = Field(ge=0, description="The step at which it was first seen.")
    code: Name = Field(description="What was found, e.g. `softmax_into_cross_entropy`.")
    layer: Name | None = None
    severity: Severity = Field(description="info: evidence only; warning and above: a fault by itself.")
    measures: tuple[Measure, ...] = ()
    source: SourceLocation | None = None
    detail: Text = ""


class CaptureNotice(Record):
    """Something that is not recorded, and why."""

    kind: Literal["capture_notice"] = "capture_notice"
    step: int = Field(ge=0)
    message: Text


Observation = Annotated[
    ModelDescription | OptimizerDescription | NonFiniteOrigin | AuditFinding | CaptureNotice,
    Field(discriminator="kind"),
]
