"""What a stranger meets first: the pins, the README, and the check that a change must pass."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradtracer import cli

ROOT = Path(__file__).parents[2]
PIN = re.compile(r'[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*( ; python_version >= "3\.11")?')


def test_constraints_are_plain_pins() -> None:
    """No host, no path, and no local version such as torch's +cpu, which PyPI does not have."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert "torch==2.13.0" in lines


def test_ci_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert [line for line in script.read_text().splitlines() if line.startswith("make")] == ["make lint", "make test"]


def test_readme_lists_the_exit_codes_of_the_command_line() -> None:
    rows = dict(re.findall(r"^\| (\d) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    codes = {value for name, value in vars(cli).items() if name.startswith("EXIT_")} | {0}
    assert {int(code) for code in rows} == codes
    help_text = CliRunner().invoke(cli.app, ["--help"]).stdout
    for code, meaning in rows.items():
        assert f"{code}  {meaning}" in help_text


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_relative_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", text):
        assert (ROOT / target).exists(), target


def test_the_story_on_the_first_page_is_the_example_that_runs() -> None:
    story = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert story in (ROOT / "examples" / "neuraldbg" / "main.py").read_text()
