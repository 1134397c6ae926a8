"""Every detector, cause and fix is documented in the same form, which the docs pages and agents rely on."""

from __future__ import annotations

import re

import pytest

from gradtracer.causes import CAUSES
from gradtracer.detectors import DETECTORS, Detector
from gradtracer.fixes import FIXES
from gradtracer.registry import docstring_sections
from gradtracer.signals import LAYER_SIGNALS, RUN_SIGNALS
from tests.detectors.streams import sample

RULES = [*DETECTORS, *CAUSES]
SECTIONS = ["What", "Why", "Definition", "Thresholds", "Fixes", "References"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.__module__.rpartition('.')[0][11:]}-{rule.code}")
def test_a_rule_has_all_sections_in_order(rule: type) -> None:
    sections = docstring_sections(rule)
    assert list(sections) == ["", *SECTIONS]
    assert all(sections.values()), [name for name, text in sections.items() if not text]
    assert "\n" not in sections[""], "the summary is one line"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.__module__.rpartition('.')[0][11:]}-{rule.code}")
def test_a_rule_names_its_sources(rule: type) -> None:
    references = docstring_sections(rule)["References"]
    assert re.search(r"\b(1[89]|20)\d\d\b|documentation|notes|NeuralDBG|audits", references), references


@pytest.mark.parametrize("rule", list(DETECTORS), ids=lambda rule: rule.code)
def test_a_detector_shows_a_recorded_signal_and_defines_it_with_its_unit(rule: type[Detector]) -> None:
    if rule.code == "audit":
        return  # It reports facts that are no number per step.
    assert rule.signal in RUN_SIGNALS | LAYER_SIGNALS
    definition = docstring_sections(rule)["Definition"]
    assert "unit" in definition or "count" in definition.lower() or "rank" in definition.lower()


@pytest.mark.parametrize("rule", list(DETECTORS), ids=lambda rule: rule.code)
def test_a_detector_takes_a_run_of_bare_steps(rule: type[Detector]) -> None:
    detector = rule()
    for i in range(100):
        assert not detector.assess(sample(i))


@pytest.mark.parametrize("rule", list(CAUSES), ids=lambda rule: rule.code)
def test_a_cause_argues_its_log_likelihood_ratios(rule: type) -> None:
    sections = docstring_sections(rule)
    assert re.search(r"[+-]\d", sections["Definition"])
    assert "ln " in sections["Thresholds"]


def test_no_cause_is_taken_for_granted_or_excluded_beforehand() -> None:
    priors = [cause.prior for cause in CAUSES]
    assert min(priors) > 0
    assert max(priors) / sum(priors) < 0.2


def test_every_fix_that_a_rule_proposes_exists() -> None:
    for rule in RULES:
        named = re.findall(r"\b(set_learning_rate|clip_grad_norm|skip_nonfinite_step|rollback)\b",
                           docstring_sections(rule)["Fixes"])  # fmt: skip
        assert all(code in FIXES for code in named)
