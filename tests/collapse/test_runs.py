"""Collapsing runs are named with their layer, and their healthy twins are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradtracer.training.audits import AuditContext
from gradtracer.training.audits.attention import AttentionAudit
from gradtracer.training.audits.latent import LatentAudit
from gradtracer.training.audits.row_spread import RowSpreadAudit
from gradtracer.training.graph import LossGraph
from gradtracer.training.layers import layers_of
from tests.collapse import programs as p
from tests.collapse.programs import Program, watch

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FAULTY: list[tuple[str, str, str, Callable[[], Program]]] = [
    ("no_scale", "attention_entropy_collapse", "attention", partial(p.reading, gain=2.5, scale=1.0)),
    ("no_scale_fused", "attention_entropy_collapse", "attention", partial(p.reading, "fused", gain=2.5, scale=1.0)),
    ("scale_upside_down", "attention_entropy_collapse", "attention", partial(p.reading, scale=8.0, width=128)),
    ("projections_too_large", "attention_entropy_collapse", "attention", partial(p.reading, gain=8.0, causal=True)),
    ("pull_without_push", "embedding_collapse", "4", partial(p.pulled_together, push=False)),
    ("pairs_without_margin", "embedding_collapse", "tower.4", partial(p.contrastive_pairs, margin=False)),
    ("no_predictor", "embedding_collapse", "student.4", partial(p.self_taught, predictor=False)),
    ("heavy_divergence", "posterior_collapse", "mean", partial(p.autoencoder, "two", 60.0)),
    ("heavy_divergence_of_halves", "posterior_collapse", "both", partial(p.autoencoder, "halves", 60.0)),
    ("heavy_divergence_of_laws", "posterior_collapse", "mean", partial(p.autoencoder, "law", 60.0)),
    ("codes_far_away", "codebook_collapse", "codes", partial(p.quantiser, "embedding", healthy=False)),
    ("average_far_away", "codebook_collapse", "codes", partial(p.quantiser, "average", healthy=False)),
    ("one_expert", "router_collapse", "mix.router", partial(p.mixture, collapsed=True)),
    ("one_soft_expert", "router_collapse", "mix.router", partial(p.mixture, collapsed=True, soft=True)),
    ("no_offsets", "dead_embeddings", "table", partial(p.fields, offsets=False)),
    ("no_offsets_sparse", "dead_embeddings", "table", partial(p.fields, offsets=False, sparse=True)),
    ("rows_below_zero", "dead_embeddings", "rows", partial(p.behind_rectifier, dead=True)),
    ("rows_thrown_about", "zombie_embeddings", "left", partial(p.two_towers, 300.0)),
]

HEALTHY: list[tuple[str, Callable[[], Program]]] = [
    ("reading", p.reading),
    ("reading_fused", partial(p.reading, "fused", causal=True)),
    ("reading_by_module", partial(p.reading, "module")),
    ("reading_causal", partial(p.reading, causal=True, heads=4)),
    ("contrast", partial(p.pulled_together, push=True)),
    ("pairs", partial(p.contrastive_pairs, margin=True)),
    ("predictor", partial(p.self_taught, predictor=True)),
    ("neural_collapse", p.classifier),
    ("smooth_labels", partial(p.classifier, 0.1)),
    ("constant_noise", p.noisy_regression),
    ("autoencoder", partial(p.autoencoder, "two", 1.0)),
    ("autoencoder_of_halves", partial(p.autoencoder, "halves", 1.0)),
    ("autoencoder_of_laws", partial(p.autoencoder, "law", 1.0)),
    ("policy", p.policy),
    ("codes", partial(p.quantiser, "embedding", healthy=True)),
    ("average", partial(p.quantiser, "average", healthy=True)),
    ("experts", partial(p.mixture, collapsed=False)),
    ("soft_experts", partial(p.mixture, collapsed=False, soft=True)),
    ("blocks_in_a_list", p.many_heads),
    ("offsets", partial(p.fields, offsets=True)),
    ("offsets_sparse", partial(p.fields, offsets=True, sparse=True)),
    ("rectified_rows", partial(p.behind_rectifier, dead=False)),
    ("bytes", p.bytes_model),
    ("power_law", p.power_law),
    ("towers", partial(p.two_towers, 30.0)),
]


@pytest.mark.parametrize(("code", "layer", "build"), [f[1:] for f in FAULTY], ids=[f[0] for f in FAULTY])
def test_a_collapse_is_named_with_its_layer(
    code: str, layer: str, build: Callable[[], Program], tmp_path: Path
) -> None:
    outcome = watch(build(), tmp_path)
    assert outcome.costly
    assert outcome.top == (code, layer), outcome.hypotheses[:3]
    assert outcome.hypotheses[0].advice


@pytest.mark.parametrize("build", [h[1] for h in HEALTHY], ids=[h[0] for h in HEALTHY])
def test_a_healthy_twin_is_left_alone(build: Callable[[], Program], tmp_path: Path) -> None:
    outcome = watch(build(), tmp_path)
    assert outcome.costly == []
    assert outcome.top[0] == "healthy"


def test_attention_that_narrows_while_the_loss_rises_is_reported(tmp_path: Path) -> None:
    outcome = watch(p.reading(rate=0.3, num_steps=200), tmp_path)
    assert "attention_collapse" in {e.kind for e in outcome.costly}
    assert "attention_entropy_collapse" in [h.code for h in outcome.hypotheses[:3]]


def test_a_collapsed_codebook_began_at_step_0(tmp_path: Path) -> None:
    outcome = watch(p.quantiser("embedding", healthy=False), tmp_path)
    assert outcome.hypotheses[0].onset_step == 0


class _Checkpointed(torch.nn.Module):
    """Counts how often its checkpointed part runs."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = p.Reader(p.Heads("plain", 32, 2, 1.0, None, causal=False), 32)
        self.num_runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(n: torch.Tensor) -> torch.Tensor:
            self.num_runs += 1
            return self.reader.attention(n)

        h = self.reader.token(x) + self.reader.place(torch.arange(x.shape[1]))
        return self.reader.head((h + checkpoint(part, self.reader.norm(h), use_reentrant=False))[:, -1])


def test_reading_attention_does_not_run_a_checkpointed_part_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Checkpointed()
    audits = [AttentionAudit(), LatentAudit(), RowSpreadAudit()]
    x = torch.randint(0, 20, (16, 14))
    loss = torch.nn.functional.cross_entropy(model(x), x[:, -3])
    layers = layers_of(model)
    context = AuditContext(
        step=0,
        model=model,
        layers=layers,
        optimizers=[],
        layer_of={id(q): layer.name for layer in layers for _, q in layer.parameters},
        names={},
        loss_fn=None,
        record=lambda layer, signal, value: None,
    )
    for audit in audits:
        assert not [f for f in audit.on_loss(context, LossGraph(loss, context.layer_of)) if f.severity != "info"]
    assert model.num_runs == 1
    loss.backward()
    assert model.num_runs == 2
