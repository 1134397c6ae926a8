"""The plug-in seam refuses what would be found under two names, or under none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradtracer.registry import Registry, docstring_sections


def make(code: str, module: str) -> type:
    return type("Rule", (), {"code": code, "__module__": f"rules.{module}"})


def test_rules_are_found_by_code_and_listed_in_order() -> None:
    registry: Registry = Registry("rule")
    second, first = registry.register(make("b", "b")), registry.register(make("a", "a"))
    assert list(registry) == [first, second]
    assert registry.codes == ["a", "b"]
    assert registry["b"] is second
    assert ("a" in registry, "c" in registry, len(registry)) == (True, False, 2)


def test_a_second_rule_of_one_code_is_refused() -> None:
    registry: Registry = Registry("rule")
    first = registry.register(make("a", "a"))
    with pytest.raises(ValueError, match="two classes claim the rule code 'a'"):
        registry.register(make("a", "a"))
    assert list(registry) == [first]


def test_a_rule_in_a_file_of_another_name_is_refused() -> None:
    registry: Registry = Registry("rule")
    with pytest.raises(ValueError, match=r"the rule 'a' stands in b\.py: expected a\.py"):
        registry.register(make("a", "b"))
    assert len(registry) == 0


def test_loading_a_package_registers_every_file_but_base_and_private_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "made_up_rules"
    package.mkdir()
    (package / "__init__.py").write_text("from gradtracer.registry import Registry\nRULES = Registry('rule')\n")
    for name in ("one", "two"):
        (package / f"{name}.py").write_text(
            f"from made_up_rules import RULES\n\n@RULES.register\nclass Rule:\n    code = {name!r}\n"
        )
    for name in ("base", "_private"):
        (package / f"{name}.py").write_text("raise AssertionError('not a rule')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import made_up_rules  # pyright: ignore[reportMissingImports]

    made_up_rules.RULES.load("made_up_rules")
    assert made_up_rules.RULES.codes == ["one", "two"]
    for module in [m for m in sys.modules if m.partition(".")[0] == "made_up_rules"]:
        monkeypatch.delitem(sys.modules, module)


def test_a_docstring_is_read_by_its_sections() -> None:
    class Rule:
        """Says what it is.

        More of it.

        What:
            A norm, over time:
            indented stays.

        Why:
            Because.
        """

    assert docstring_sections(Rule) == {
        "": "Says what it is.\n\nMore of it.",
        "What": "A norm, over time:\nindented stays.",
        "Why": "Because.",
    }
