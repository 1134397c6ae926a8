"""What causes of the model suggest is within bounds, claimed by its fix, and can be applied to the run as it stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gradtracer import FlowTracker
from gradtracer.fixes import get_fix
from tests.causes.fabricate import fixes
from tests.collapse import programs as p
from tests.collapse.programs import Program

pytestmark = pytest.mark.slow

FAULTY: dict[str, tuple[str, str, Callable[[], Program]]] = {
    "no_scale": ("attention_entropy_collapse", "scale_attention_logits", partial(p.reading, gain=2.5, scale=1.0)),
    "fused": ("attention_entropy_collapse", "scale_attention_logits", partial(p.reading, "fused", gain=2.5, scale=1.0)),
    "pull": ("embedding_collapse", "normalize_outputs", partial(p.pulled_together, push=False)),
    "pairs": ("embedding_collapse", "normalize_outputs", partial(p.contrastive_pairs, margin=False)),
    "divergence": ("posterior_collapse", "free_latent_bits", partial(p.autoencoder, "two", 60.0)),
    "halves": ("posterior_collapse", "free_latent_bits", partial(p.autoencoder, "halves", 60.0)),
    "law": ("posterior_collapse", "free_latent_bits", partial(p.autoencoder, "law", 60.0)),
    "codes": ("codebook_collapse", "revive_codes", partial(p.quantiser, "embedding", healthy=False)),
    "average": ("codebook_collapse", "revive_codes", partial(p.quantiser, "average", healthy=False)),
    "one_expert": ("router_collapse", "balance_experts", partial(p.mixture, collapsed=True)),
    "soft_expert": ("router_collapse", "balance_experts", partial(p.mixture, collapsed=True, soft=True)),
    "rows": ("zombie_embeddings", "damp_rows", partial(p.two_towers, 300.0)),
}
SIGNALS = {
    "posterior_collapse": "latent_information", "codebook_collapse": "codebook_perplexity",
    "embedding_collapse": "row_spread",
}  # fmt: skip
"""What must rise where the fix worked."""


@pytest.mark.parametrize("name", FAULTY)
def test_the_first_suggestion_is_that_of_the_cause_and_works_on_the_run(name: str, tmp_path: Path) -> None:
    code, expected, build = FAULTY[name]
    program = build()

    def train(first: int, count: int) -> float:
        loss = math.nan
        for i in range(first, first + count):
            program.optimizer.zero_grad()
            value = program.loss(i)
            value.backward()
            program.optimizer.step()
            if program.after:
                program.after()
            loss = value.item()
            tracker.step(loss)
        return loss

    with FlowTracker(
        program.model, program.optimizer, serve=False, home=tmp_path, track_interval=10, replay=program.loss
    ) as tracker:
        train(0, program.num_steps)
        found = next(h for h in tracker.explain_failure() if h.code == code)
        assert fixes(found)[0][0] == expected
        for suggested, parameters in fixes(found):
            get_fix(suggested).parse(parameters)
            assert code in get_fix(suggested).mends
        fix = get_fix(expected)
        fix.apply(tracker._run, fix.parse(fixes(found)[0][1]))
        assert math.isfinite(train(program.num_steps, 150))
        series = tracker._series()
    assert not tracker.broken_reason
    assert series is not None
    if code in SIGNALS:
        steps, values = series.layer(found.layer or "", SIGNALS[code])
        before, after = values[steps < program.num_steps][-3:], values[-3:]
        assert min(after) > 2 * max(before)
