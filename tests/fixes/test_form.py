"""Every fix is described so that an agent can use it."""

from __future__ import annotations

import pytest

from gradtracer.fixes import FIXES, Fix, get_fix
from gradtracer.registry import docstring_sections


@pytest.mark.parametrize("code", FIXES.codes)
def test_a_fix_has_its_sections_bounded_parameters_and_causes(code: str) -> None:
    fix = get_fix(code)
    assert isinstance(fix, Fix)
    assert list(docstring_sections(type(fix)))[:4] == ["", "What", "Why", "Definition"]
    assert {"Safety", "Undo"} <= set(docstring_sections(type(fix)))
    info = fix.info()
    assert info.mends
    assert info.description
    for parameter in info.parameters:
        assert parameter.description
        if parameter.type == "number":
            assert parameter.minimum is not None or parameter.exclusive_minimum is not None
            assert parameter.maximum is not None
