"""Whether evaluation mode turns off what training mode turns on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradtracer.records import AuditFinding, Measure, Severity, clean_name
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import ROOT, source_of
from gradtracer.training.probe import Call, copied, copy_of, may_probe, run_copy

_SWITCHED = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout,
}  # fmt: skip
_UNIFORM = {torch.rand, torch.rand_like, Tensor.uniform_}
_BERNOULLI = {torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_}
_COMPARE = {
    torch.lt, torch.gt, torch.le, torch.ge, Tensor.lt, Tensor.gt, Tensor.le, Tensor.ge,
    Tensor.__lt__, Tensor.__gt__, Tensor.__le__, Tensor.__ge__,
}  # fmt: skip
_RECAST = {
    Tensor.float, Tensor.to, Tensor.type_as, Tensor.type, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.div_,
    Tensor.div, torch.div, Tensor.__truediv__, Tensor.bool, Tensor.unsqueeze, Tensor.view,
}  # fmt: skip
_APPLY = {
    torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.masked_fill,
    Tensor.masked_fill_, torch.where,
}  # fmt: skip
_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


@AUDITS.register
class EvaluationMode(Audit):
    """Dropout that ignores `eval()`, and training that goes on in evaluation mode.

    What:
        A copy of the model in evaluation mode is run on a batch: dropout that is active there (as a function with
        training=True or its default, with a mask made by hand, or as a module that `eval()` does not reach). And the
        mode of the model itself at training steps.

    Why:
        With dropout in evaluation every answer is random, and worse; with evaluation mode in training, dropout and
        batch statistics are off, mostly since a validation that ended without `train()`.

    Definition:
        Dropout is active: a call of a dropout function with training and p > 0; attention with dropout_p > 0; or a
        mask of Bernoulli draws or compared uniform draws, of the shape of the hidden activation it is multiplied with,
        or one number a row. Layer: the last layer with parameters that ran before.
        Training in evaluation mode: `model.training` is False at three sampled steps in a row, with dropout (p > 0) or
        batch normalisation inside, while it had been True at a step before, or while the batch normalisations have
        never seen a batch.

    Thresholds:
        None: a call is a fact. Noise that is drawn normally (a variational sample, a diffusion step) and masks on the
        input (a denoising task) are meant, and left out. A model that was in evaluation mode from its first step on
        may be fine-tuned so on purpose: `info`, unless its running statistics are still the initial ones.

    Fixes:
        In the source: training=self.training, nn.Dropout in a registered container, model.train() after validation.

    References:
        Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov 2014, JMLR 15. torch documentation of
        nn.functional.dropout (its `training` is True by default).
    """

    code = "evaluation_mode"

    PROBE_STEPS = (3, 100, 1000)
    PATIENCE = 3

    def __init__(self) -> None:
        self._call: Call | None = None
        self._rows: int | None = None
        self._next = 0
        self._was_training = False
        self._num_eval, self._eval_since = 0, 0
        self._seen_this_step = False

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Note the call of the model, and its mode."""
        if module is not context.model:
            return
        due = self._next < len(self.PROBE_STEPS) and context.step >= self.PROBE_STEPS[self._next]
        if due and self._call is None:
            self._call = Call(tuple(inputs), dict(context.kwargs or {}))
            first = next((x for x in (*inputs, *self._call.kwargs.values()) if isinstance(x, Tensor)), None)
            self._rows = first.shape[0] if first is not None and first.dim() > 0 else None
        if not self._seen_this_step:
            self._seen_this_step = True
            yield from self._look_at_mode(context)

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Run a copy in evaluation mode."""
        if self._call is None:
            return ()
        call, self._call = self._call, None
        self._next += 1
        if not may_probe(context.model):
            return ()
        try:
            with copy_of(context.model) as clone:
                watch = _DropoutWatch(clone)
                run_copy(clone, copied(call, self._rows), seed=0, watch=watch)
        except Exception:  # the user's code on a copy may raise anything; then nothing is claimed
            return ()
        return [
            finding(
                context,
                "dropout_in_evaluation",
                f"{what} is active in evaluation mode, behind {layer}.",
                layer=layer,
                measures=(Measure(name="dropout_probability", value=p),) if p is not None else (),
                source=source_of(_owner(context.model, layer)),
            )
            for layer, (what, p) in list(watch.found.items())[:4]
        ]

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Forget the call of a step without backward."""
        self._call, self._seen_this_step = None, False
        return ()

    def _look_at_mode(self, context: AuditContext) -> Iterable[AuditFinding]:
        model = context.model
        if model.training:
            self._was_training, self._num_eval = True, 0
            return
        self._eval_since = context.step if self._num_eval == 0 else self._eval_since
        self._num_eval += 1
        if self._num_eval < self.PATIENCE:
            return
        switched = [(n, m) for n, m in model.named_modules() if _differs_by_mode(m)]
        if not switched:
            return
        fresh = any(isinstance(m, _NORMS) and int(m.num_batches_tracked or 0) == 0 for _, m in switched)
        name = clean_name(switched[0][0]) or ROOT
        kinds = " and ".join(sorted({type(m).__name__ for _, m in switched})[:3])
        since = f"since step {self._eval_since}" if self._eval_since else "from the first step on"
        yield finding(
            context,
            "training_in_evaluation_mode",
            f"The model trains in evaluation mode {since}: {kinds} (of {name} and others) are off.",
            layer=None,
            severity=Severity.WARNING if self._was_training or fresh else Severity.INFO,
            measures=(Measure(name="first_step", value=float(self._eval_since)),),
            source=source_of(model),
        )


def _differs_by_mode(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, _NORMS) and module.track_running_stats and any(
        p.requires_grad for p in module.parameters(recurse=False)
    )  # fmt: skip


def _owner(model: nn.Module, layer: str) -> nn.Module:
    """The module that holds the layer: its forward is where the dropout is called."""
    try:
        return model.get_submodule(layer.rpartition(".")[0])
    except AttributeError:
        return model


class _DropoutWatch(TorchFunctionMode):
    """Sees calls of dropout functions, and masks made by hand, in one forward pass of a copy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, float | None]] = {}
        self._running: list[str] = []
        self._last: str | None = None
        self._uniform: dict[int, Tensor] = {}
        self._masks: dict[int, Tensor] = {}
        for path, module in model.named_modules():
            name = clean_name(path) or ROOT
            module.register_forward_pre_hook(lambda m, i, name=name: self._running.append(name))
            own = next(module.parameters(recurse=False), None) is not None
            module.register_forward_hook(lambda m, i, o, name=name, own=own: self._done(name, own))

    def _done(self, name: str, has_parameters: bool) -> None:
        if self._running:
            self._running.pop()
        if has_parameters and name != ROOT:
            self._last = name

    @property
    def _here(self) -> str:
        return self._last or (self._running[-1] if self._running else ROOT)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SWITCHED:
            p, training = _argument(args, kwargs, 1, "p", 0.5), _argument(args, kwargs, 2, "training", True)
            if training and p > 0:
                self.found.setdefault(self._here, (f"{getattr(func, '__name__', 'dropout')}", float(p)))
        elif func is F.scaled_dot_product_attention:
            p = _argument(args, kwargs, 4, "dropout_p", 0.0)
            if p > 0:
                self.found.setdefault(self._here, ("dropout_p of scaled_dot_product_attention", float(p)))
        elif func is F.multi_head_attention_forward:
            p, training = args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0), kwargs.get("training", True)
            if training and p > 0:
                self.found.setdefault(self._running[-1] if self._running else ROOT, ("attention dropout", float(p)))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        mask = next((t for t in tensors if id(t) in self._masks), None)
        if func in _UNIFORM:
            self._uniform[id(result)] = result
        elif func in _BERNOULLI:
            chance = tensors[0] if func is not Tensor.bernoulli_ and tensors else None
            if chance is None or bool((chance == chance.reshape(-1)[0]).all()):
                self._masks[id(result)] = result
        elif (func in _COMPARE and len(tensors) == 1 and id(tensors[0]) in self._uniform) or (
            mask is not None and func in _RECAST
        ):
            self._masks[id(result)] = result
        elif mask is not None and func in _APPLY and self._last is not None:
            masked = [t for t in tensors if id(t) not in self._masks and t.is_floating_point() and t.dim() > 1]
            if any(_drops(mask, t) for t in masked):
                self.found.setdefault(self._last, ("A random mask", None))


def _drops(mask: Tensor, values: Tensor) -> bool:
    by_row = mask.dim() == values.dim() and mask.shape[0] == values.shape[0] and mask.numel() == mask.shape[0]
    return (mask.shape == values.shape and mask.shape[-1] > 1) or by_row


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
