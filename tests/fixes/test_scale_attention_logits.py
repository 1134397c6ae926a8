"""The softmax of an attention gets smaller logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, live, program


class Attention(nn.Module):
    """Without 1/sqrt(d) unless `scale` says so."""

    def __init__(self, width: int, scale: float, way: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.scale, self.way, self.soft = scale, way, nn.Softmax(dim=-1)

    def forward(self, h: Tensor) -> Tensor:
        q, k = (F.layer_norm(p(h), h.shape[-1:]) for p in (self.q, self.k))
        if self.way == "fused":
            return F.scaled_dot_product_attention(q, k, self.v(h), scale=self.scale)
        logits = q @ k.transpose(1, 2) * self.scale
        weights = self.soft(logits) if self.way == "module" else torch.softmax(logits, -1)
        return weights @ self.v(h)


class Reader(nn.Module):
    def __init__(self, scale: float, way: str, width: int = 64) -> None:
        super().__init__()
        self.token, self.attention, self.head = (
            nn.Embedding(30, width),
            Attention(width, scale, way),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x)
        return self.head((h + self.attention(h))[:, -1])


def _reading(seed: int, scale: float, way: str = "function") -> Program:
    """One of eight tokens is a digit; the last place must tell which."""
    torch.manual_seed(seed)
    model = Reader(scale, way)

    def loss() -> Tensor:
        x, y = torch.randint(10, 30, (64, 8)), torch.randint(0, 10, (64,))
        x[torch.arange(64), torch.randint(0, 7, (64,))] = y
        return F.cross_entropy(model(x), y)

    return program(model, torch.optim.Adam(model.parameters(), 2e-3), loss)


def _unscaled(seed: int) -> Program:
    return _reading(seed, 2.0)


def _usual(seed: int) -> Program:
    return _reading(seed, 64**-0.5)


@pytest.mark.slow
def test_a_saturated_attention_learns_where_to_look() -> None:
    for seed in range(2):
        ends = []
        for treated in (False, True):
            with live(_unscaled(seed)) as run:
                run.train(2)
                if treated:
                    run.apply("scale_attention_logits", layers="attention", factor=1 / 16)
                ends.append(sum(run.train(120)[-20:]) / 20)
        assert ends[1] < 0.5 * ends[0]


@pytest.mark.slow
def test_a_factor_near_one_does_not_hurt() -> None:
    assert_harmless(_usual, "scale_attention_logits", layers="attention", factor=0.8)


def test_undo_leaves_nothing() -> None:
    assert_undone_exactly(_unscaled, "scale_attention_logits", layers="attention", factor=0.1)


@pytest.mark.parametrize("way", ["function", "module", "fused"])
def test_the_output_is_that_of_scaled_logits(way: str) -> None:
    made, scaled = _reading(0, 2.0, way), _reading(0, 0.25, way)
    x = torch.randint(0, 30, (5, 8))
    with live(made) as run:
        run.apply("scale_attention_logits", layers="attention", factor=0.125, unit_queries=False)
        torch.testing.assert_close(made.model(x), scaled.model(x))


def test_queries_and_keys_are_scaled_down_where_they_are_large() -> None:
    made = _unscaled(0)
    attention = made.model.attention
    with torch.no_grad():
        attention.q.weight.mul_(40)  # type: ignore[union-attr,operator]
    before = {n: p.detach().clone() for n, p in attention.named_parameters()}  # type: ignore[union-attr]
    with live(made) as run:
        run.apply("scale_attention_logits", layers="attention", factor=0.5)
        outputs: list[Tensor] = []
        attention.q.register_forward_hook(lambda m, i, o: outputs.append(o.detach()))  # type: ignore[union-attr]
        made.model(torch.randint(0, 30, (200, 8)))
        assert float(outputs[0].std()) == pytest.approx(1 / math.sqrt(3), rel=0.1)
        assert torch.equal(attention.k.weight, before["k.weight"])  # type: ignore[union-attr]
        assert torch.equal(attention.v.weight, before["v.weight"])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"layers": "x", "factor": 0.5}, "no layer 'x'"), ({"layers": "attention", "factor": 2.0}, "factor")],
)
def test_what_cannot_be_scaled_is_refused(parameters: dict[str, object], message: str) -> None:
    with live(_usual(0)) as run, pytest.raises(BadParameter, match=message):
        run.preview("scale_attention_logits", **parameters)  # type: ignore[arg-type]
