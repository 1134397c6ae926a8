"""Every code of the taxonomy is a cause that can be named."""

from __future__ import annotations

import re
from pathlib import Path

from gradtracer.causes import CAUSES

TAXONOMY = Path(__file__).parents[2] / "benchmarks" / "faults" / "TAXONOMY.md"


def test_every_code_of_the_taxonomy_has_its_cause_and_no_cause_is_outside_it() -> None:
    codes = re.findall(r"^\| ([a-z][a-z0-9_]+) \|", TAXONOMY.read_text(), re.MULTILINE)
    codes = [c for c in codes if c != "code"]
    assert len(codes) > 50
    assert sorted(codes) == CAUSES.codes
