"""Parametrised families of which a few members always run, and all with `make test`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def family(members: Iterable[object], *quick: object) -> list[ParameterSet]:
    """The members as parameters of a test: those not named `quick` are slow."""
    return [pytest.param(member, marks=[] if member in quick else pytest.mark.slow) for member in members]
