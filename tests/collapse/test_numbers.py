"""Each number against a slow twin in float64, from its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtracer.training.audits.attention import sharpness
from gradtracer.training.audits.codebook import usage_perplexity
from gradtracer.training.audits.embedding_rows import rare_row_gradient, row_norms
from gradtracer.training.audits.latent import latent_numbers
from gradtracer.training.audits.row_spread import row_spread


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-4, abs=1e-6)


def test_sharpness_of_attention_is_entropy_saturation_spread_and_agreement() -> None:
    torch.manual_seed(0)
    scores = 6 * torch.randn(5, 7, 9, dtype=torch.float64)
    later = torch.ones(7, 9, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    entropies: list[float] = []
    spreads: list[float] = []
    votes = [0] * 9
    for example in weights:
        for place, row in enumerate(example):
            if place < 3:
                continue  # fewer than 4 keys
            allowed = [float(w) for w in row[: place + 1]]
            entropies.append(-sum(w * math.log(w) for w in allowed) / math.log(len(allowed)))
            logs = [math.log(w) for w in allowed]
            mean = sum(logs) / len(logs)
            spreads.append(math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs)))
            votes[max(range(len(allowed)), key=allowed.__getitem__)] += 1
    found = sharpness(weights.float())
    assert found is not None
    assert float(found.entropy) == near(sum(entropies) / len(entropies))
    assert float(found.saturation) == near(sum(e < 0.1 for e in entropies) / len(entropies))
    assert float(found.logit_std) == near(sum(spreads) / len(spreads))
    assert float(found.key_share) == near(max(votes) / len(entropies))


def test_attention_over_three_keys_is_not_judged() -> None:
    assert sharpness(torch.rand(4, 6, 3).softmax(-1)) is None


def test_row_spread_is_one_minus_the_mean_cosine_over_pairs() -> None:
    torch.manual_seed(1)
    rows = torch.randn(20, 5, dtype=torch.float64) + 1.5
    cosines = [float(torch.dot(a, b) / (a.norm() * b.norm())) for a in rows for b in rows]
    found = row_spread(rows.float())
    assert found is not None
    assert float(found) == near(1 - sum(cosines) / len(cosines))


def test_an_image_is_one_row() -> None:
    torch.manual_seed(2)
    images = torch.randn(10, 3, 4, 4)
    found, flat = row_spread(images), row_spread(images.reshape(10, 48))
    assert found is not None
    assert flat is not None
    assert float(found) == float(flat)


@pytest.mark.parametrize("shape", [(4, 6), (30, 1), (30,)])
def test_too_few_rows_or_features_have_no_spread(shape: tuple[int, ...]) -> None:
    assert row_spread(torch.randn(shape)) is None


def test_information_and_divergence_of_a_latent() -> None:
    torch.manual_seed(3)
    mean, sigma = torch.randn(40, 3, dtype=torch.float64), torch.rand(40, 3, dtype=torch.float64) + 0.2
    information = divergence = 0.0
    for j in range(3):
        m, s = [float(x) for x in mean[:, j]], [float(x) for x in sigma[:, j]]
        centre = sum(m) / 40
        signal, noise = sum((x - centre) ** 2 for x in m) / 40, sum(x * x for x in s) / 40
        information += 0.5 * math.log(1 + signal / noise)
        divergence += sum(0.5 * (a * a + b * b - 1 - math.log(b * b)) for a, b in zip(m, s, strict=True)) / 40
    found = latent_numbers(mean.float(), sigma.float())
    assert float(found[0]) == near(information)
    assert float(found[1]) == near(divergence)


def test_perplexity_of_codes() -> None:
    codes = torch.tensor([0, 0, 0, 2, 2, 5])
    shares = [3 / 6, 2 / 6, 1 / 6]
    assert float(usage_perplexity(codes, 8)) == near(math.exp(-sum(q * math.log(q) for q in shares)))
    assert float(usage_perplexity(torch.zeros(9, dtype=torch.long), 8)) == near(1.0)


def test_row_norms_of_a_sparse_gradient_are_those_of_the_dense_one() -> None:
    torch.manual_seed(4)
    index = torch.tensor([[1, 4, 1]])
    sparse = torch.sparse_coo_tensor(index, torch.randn(3, 2), (6, 2), check_invariants=True)
    assert torch.allclose(row_norms(sparse), row_norms(sparse.to_dense()))


def _rare(norms: Tensor, counts: Tensor, times: Tensor) -> float:
    drawn = [i for i in range(len(counts)) if counts[i] > 0]
    ordered = sorted(float(times[i]) for i in drawn)

    def quantile(q: float) -> float:
        place = q * (len(ordered) - 1)
        low = math.floor(place)
        return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    low, high = quantile(0.5), quantile(0.9)
    if high < 10 * low:
        return 1.0
    rare = [float(norms[i] / counts[i]) for i in drawn if times[i] <= low]
    frequent = [float(norms[i] / counts[i]) for i in drawn if times[i] >= high]
    return (sum(rare) / len(rare)) / (sum(frequent) / len(frequent))


@pytest.mark.parametrize("skew", [1.0, 40.0])
def test_gradient_of_rare_rows_against_frequent_ones(skew: float) -> None:
    torch.manual_seed(5)
    counts = torch.tensor([1.0, 0.0, 2.0, 1.0, 9.0, 1.0, 3.0, 1.0, 1.0, 2.0, 12.0, 1.0])
    times = torch.where(counts > 5, skew, 1.0)
    norms = torch.rand(12)
    found = rare_row_gradient(norms, counts, times, counts > 0)
    assert float(found) == near(_rare(norms.double(), counts.double(), times.double()))
