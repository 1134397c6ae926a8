"""Weights as they are before the first update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, clean_name
from gradtracer.training.audits._sampling import thin
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, saved_tensors

_BOUNDED = (nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid)
_ROWS_OF_GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}
_SAMPLE = 16_384


@dataclass(frozen=True, eq=False)
class _Weight:
    layer: str
    parameter: nn.Parameter
    gain: float
    """RMS(w) sqrt(fan_in / 2): 1 for He's initialisation."""
    recurrent: bool


@dataclass
class _Flow:
    """What passed a module at the first forward pass."""

    fed: Tensor
    put_out: Tensor
    saturated: Tensor | None


@AUDITS.register
class Initialisation(Audit):
    """Whether the first weights have a useful scale, and units that differ.

    What:
        Weights drawn far too large or too small, which shows in the first outputs and the first loss; layers whose
        units are all the same and stay so.

    Why:
        Logits in the hundreds make a first loss far above that of guessing, and gradients to match. Saturated units
        pass no gradient; outputs that do not depend on the input teach nothing. Units that are equal get equal
        gradients: the layer has the capacity of one unit.

    Definition:
        Gain ``g = RMS(w) sqrt(fan_in / 2)`` of each weight of a linear, convolutional or recurrent layer, no unit;
        ``s = RMS(w) sqrt(n)`` of a square recurrent matrix, which is applied at every time step.
        weights_too_large (`warning`): g >= 3 or s >= 1.5 somewhere, and the first loss shows it: a cross-entropy at
        least 3 times that of guessing (ln of the number of classes), a squared error at least 10 times the mean
        square of the target by outputs at least 3 times as large as it; or at least half of the outputs of half of the
        bounded activations are within 1 % of a bound. Not where the input itself has an RMS above 10.
        weights_too_small (`warning`): g <= 0.03 in at least 2 layers, none of them exactly 0, and the last layer's
        output varies over the batch by less than 1e-3 of its input.
        units_identical (`warning`): all rows (units) of a weight are equal to the bit, of a recurrent one all rows of a
        gate, before the first of the sampled updates and still after 12 of them, with a gradient and a rate above 0.
        Layer: the first in forward order, for weights_too_large the first with g >= 1.5.

    Thresholds:
        The usual schemes lie between g = 0.4 (PyTorch's default) and 1 (He), or 0.1 (a deviation of 0.02 in a small
        transformer): 3 is three times the largest of these, 0.03 a third of the smallest; 1.5
        is beyond all of them, and one scheme for all layers gives small layers a small g. Orthogonal and identity
        recurrent matrices have s = 1, a rectified one may have 1.4. Scales alone decide nothing, because a
        normalisation undoes them. A last layer that begins at zero has different rows after one update, and what lies
        behind it after two; 12 sampled updates are some 30 steps.

    Fixes:
        None that is live yet: use the initialisation of PyTorch, He's (rectifiers) or Glorot's.

    References:
        Glorot & Bengio 2010, AISTATS, eq. 12. He, Zhang, Ren, Sun 2015, arXiv:1502.01852, eq. 10. Goodfellow, Bengio,
        Courville 2016, Deep Learning, section 8.4 (breaking symmetry).
    """

    code = "initialisation"

    LARGE, SMALL = 3.0, 0.03
    LARGE_RECURRENT = 1.5
    ABOVE_USUAL = 1.5
    ABOVE_GUESSING = 3.0
    ABOVE_TARGET = 10.0
    LARGE_INPUT = 10.0
    NO_SIGNAL = 1e-3
    SATURATED = 0.5
    UPDATES = 12

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] | None = {}
        self._equal: list[tuple[str, nn.Parameter, int]] | None = None
        self._num_updates = 0

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Note the scales of the first forward pass."""
        if self._flows is None or context.step > 0 or not name or name in self._flows:
            return ()
        fed, put_out = _tensor(inputs), _tensor(output)
        if put_out is not None:
            sample = _floats(put_out)
            saturated = None
            if isinstance(module, _BOUNDED):
                low = -1.0 if isinstance(module, (nn.Tanh, nn.Hardtanh)) else 0.0
                margin = 0.01 * (1.0 - low)
                saturated = ((sample < low + margin) | (sample > 1.0 - margin)).float().mean()
            self._flows[name] = _Flow(_rms(_floats(fed)) if fed is not None else torch.tensor(math.nan),
                                      _spread(put_out), saturated)  # fmt: skip
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Judge the scale of the weights by the first loss."""
        flows, self._flows = self._flows, None
        if flows is None or context.step > 0:
            return
        order = {name: i for i, name in enumerate(flows)}
        weights = sorted(_weights(context.model), key=lambda w: order.get(w.layer, len(order)))
        fed = next((float(f.fed) for f in flows.values() if not math.isnan(float(f.fed))), math.nan)
        large = [w for w in weights if w.gain >= (self._recurrent_gain if w.recurrent else self.LARGE)]
        if large and not fed > self.LARGE_INPUT:
            wide = [w for w in weights if w.gain >= self.ABOVE_USUAL or any(w is other for other in large)]
            for statement, measure in (*self._first_loss(graph), *self._saturation(flows)):
                yield self._off(context, "weights_too_large", wide[0], wide, statement, measure)
                return
        small = [w for w in weights if 0 < w.gain <= self.SMALL]
        if len({w.layer for w in small}) >= 2 and fed > 0:
            out = next((f.put_out for n, f in reversed(flows.items()) if any(w.layer == n for w in weights)), None)
            if out is not None and 0 <= float(out) < self.NO_SIGNAL * fed:
                statement = f"The last layer's output varies by {float(out):.2g} over the batch"
                measure = Measure(name="output_over_input", value=float(out) / fed, threshold=self.NO_SIGNAL)
                yield self._off(context, "weights_too_small", small[0], small, statement, measure)

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Find layers of identical units."""
        if self._equal is None:
            self._equal = []
            if context.step == 0:
                self._equal = [
                    (w.layer, w.parameter, gates)
                    for w, gates in _with_gates(context.model)
                    if w.parameter.requires_grad and _identical(w.parameter, gates)
                ]
        return ()

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """See whether they are still identical."""
        if not self._equal:
            return
        self._num_updates += all(group.get("lr", 1.0) > 0 for group in optimizer.param_groups)
        if self._num_updates != self.UPDATES:
            return
        for layer, parameter, gates in self._equal:
            if parameter.grad is not None and _identical(parameter, gates):
                zero = not bool(parameter.any())
                yield finding(
                    context,
                    "units_identical",
                    f"All {parameter.shape[0]} units of {layer} began with {'zero' if zero else 'the same'} weights "
                    "and still have the same after 12 sampled updates.",
                    layer=layer,
                    measures=[Measure(name="num_units", value=float(parameter.shape[0]))],
                ).model_copy(update={"step": 0})
        self._equal = []

    @property
    def _recurrent_gain(self) -> float:
        return self.LARGE_RECURRENT / math.sqrt(2.0)

    def _first_loss(self, graph: LossGraph) -> Iterator[tuple[str, Measure]]:
        """The loss nodes whose value is far above what guessing would give."""
        for node in graph.nodes:
            name = node.name()
            prediction, target = (next(saved_tensors(node, f"_saved_{n}"), None) for n in ("self", "target"))
            if prediction is None or target is None or not prediction.numel():
                continue
            if name in ("NllLossBackward0", "NllLoss2DBackward0") and prediction.dim() > 1:
                ignored = int(getattr(node, "_saved_ignore_index", -100))
                if ignored >= 2**63:  # the node keeps it as an unsigned number
                    ignored -= 2**64
                loss = float(F.nll_loss(prediction.float(), target, ignore_index=ignored))
                guess = math.log(prediction.shape[1])
            elif name == "BinaryCrossEntropyWithLogitsBackward0":
                loss = float(F.binary_cross_entropy_with_logits(prediction.float(), target.float()))
                guess = math.log(2.0)
            elif name == "MseLossBackward0" and prediction.shape == target.shape:
                loss, guess = (
                    float(F.mse_loss(prediction.float(), target.float())),
                    float(target.float().square().mean()),
                )
                if guess > 0 and loss >= self.ABOVE_TARGET * guess:
                    yield (
                        f"The first squared error is {loss:.3g}, {loss / guess:.3g} times the target's mean square",
                        Measure(name="loss", value=loss, baseline=guess, threshold=self.ABOVE_TARGET * guess),
                    )
                continue
            else:
                continue
            if math.isfinite(loss) and guess > 0 and loss >= self.ABOVE_GUESSING * guess:
                yield (
                    f"The first loss is {loss:.3g}; guessing would give {guess:.3g}",
                    Measure(name="loss", value=loss, baseline=guess, threshold=self.ABOVE_GUESSING * guess),
                )

    def _saturation(self, flows: dict[str, _Flow]) -> Iterator[tuple[str, Measure]]:
        shares = sorted(float(f.saturated) for f in flows.values() if f.saturated is not None)
        if shares and shares[len(shares) // 2] >= self.SATURATED:
            share = shares[len(shares) // 2]
            yield (
                f"{share:.0%} of the outputs of the bounded activations are at a bound before any training",
                Measure(name="saturated_fraction", value=share, threshold=self.SATURATED),
            )

    def _off(
        self, context: AuditContext, code: str, root: _Weight, off: list[_Weight], statement: str, measure: Measure
    ) -> AuditFinding:
        return finding(
            context,
            code,
            f"{statement}; the weights of {root.layer} are {root.gain:.2g} times those of He's initialisation"
            + (f", and {len(off) - 1} more are off." if len(off) > 1 else "."),
            layer=root.layer,
            measures=[measure, Measure(name="gain", value=root.gain, baseline=1.0)],
        )


def _weights(model: nn.Module) -> list[_Weight]:
    found: list[_Weight] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase)):
            continue
        for name, p in module.named_parameters(recurse=False):
            if p.dim() < 2 or p.numel() == 0 or not p.is_floating_point():
                continue
            rms = float(thin(p, _SAMPLE).float().square().mean().sqrt())
            gain = rms * math.sqrt(p[0].numel() / 2.0)
            if math.isfinite(gain):
                found.append(_Weight(clean_name(path) or "(root)", p, gain, "weight_hh" in name))
    return found


def _with_gates(model: nn.Module) -> Iterator[tuple[_Weight, int]]:
    types = {clean_name(path) or "(root)": type(m).__name__ for path, m in model.named_modules()}
    for weight in _weights(model):
        yield weight, _ROWS_OF_GATES.get(types[weight.layer], 1)


def _identical(parameter: Tensor, gates: int) -> bool:
    """Whether all rows of each gate are equal to the bit."""
    if parameter.shape[0] // gates < 2:
        return False
    rows = parameter.detach().flatten(1)
    per_gate = rows.reshape(gates, rows.shape[0] // gates, -1)
    return bool((per_gate == per_gate[:, :1]).all())


def _tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values if values.is_floating_point() and values.numel() else None
    if isinstance(values, (tuple, list)):
        return next((t for v in values if (t := _tensor(v)) is not None), None)
    return None


def _floats(tensor: Tensor) -> Tensor:
    return thin(tensor, _SAMPLE).float()


def _rms(sample: Tensor) -> Tensor:
    return sample.square().mean().sqrt()


def _spread(output: Tensor) -> Tensor:
    """RMS deviation over the first axis: how much the output depends on the example."""
    rows = output.detach().flatten(1) if output.dim() > 1 else output.detach()[:, None]
    rows = rows[:64].float()
    return (rows - rows.mean(dim=0)).square().mean().sqrt()
