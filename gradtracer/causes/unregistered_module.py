"""Layers that the model does not know."""

from __future__ import annotations

from gradtracer.causes._reading import evidence, fix
from gradtracer.causes._wiring import audit_case, audited
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class UnregisteredModule(Cause):
    """Layers are kept where the model does not see them, in a plain list or dict.

    What:
        Modules in a Python list, dict or object, or plain tensors with requires_grad: they run, and are not in
        model.modules().

    Why:
        model.parameters() leaves them out, so they keep their initial values; state_dict() and to() leave them out
        too.

    Definition:
        Evidence, with its log-likelihood ratio in nats: leaves of the loss's graph hang on a module of the model
        outside of its parameters, no optimizer holds them and nothing writes them: +6.5; the optimizer holds other
        parameters of the model: +0.5. Root: the attribute that holds them. Onset: step 0.

    Thresholds:
        A network kept off the parameters on purpose (a teacher) runs without gradients, and then it is in no graph;
        one of some six hundred does not: ln 650 = 6.5.

    Fixes:
        add_missing_parameters lets them train. In the source: register the modules, or they are not saved.

    References:
        PyTorch documentation, torch.nn.ModuleList. pytorch/pytorch issue 715.
    """

    code = "unregistered_module"
    title = "Layers are not registered in the model"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh parameters that the model does not know."""
        found = audited(series, "unregistered_parameters")
        if not found:
            return None
        names = [f.layer for f in found if f.layer]
        return audit_case(
            series,
            found,
            "They are used at every step and never updated, saved or moved to a device.",
            f"Hold {', '.join(names[:3])} in nn.ModuleList, nn.ModuleDict or nn.ParameterList (single tensors in "
            "nn.Parameter) where the class sets it, and build the optimizer after that.",
            more=[evidence("The other parameters of the model train.", 0.5)],
            source=found[0].source,
            fixes=(fix("add_missing_parameters", "They train with the others, at the rate of the largest group."),),
        )
