from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from lxml import etree

from gradtracer import schemas, xml
from gradtracer.errors import InvalidDocument
from gradtracer.records import Diagnosis, DiagnosticReport, Intervention, RunManifest, RunStatus
from gradtracer.schemas import COMMAND, XSD_NAME, generate, schema_path, stale, validate, write
from gradtracer.xml import to_xml
from tests.documents.strategies import documents
from tests.documents.test_xml import REPORT, intervention
from tests.families import family

QUICK = settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck), derandomize=True)
KINDS = schemas.documents()


def test_committed_schemas_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert schemas.main(["--check"]) == 0, capsys.readouterr().err


def test_every_kind_of_document_is_published_and_the_manifest_with_its_token_is_not() -> None:
    assert {Diagnosis, DiagnosticReport, Intervention, RunStatus} <= set(KINDS.values())
    assert RunManifest not in KINDS.values()
    assert not any("token" in text for text in generate().values())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_schema_says_what_it_is(kind: str) -> None:
    schema = json.loads(schema_path(f"{kind}.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"urn:gradtracer:records:1:{kind}"
    assert schema["title"] == KINDS[kind].__name__
    assert schema["properties"]["kind"]["const"] == kind
    assert set(schema["required"]) == set(schema["properties"])
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("kind", family(sorted(KINDS), "layer_stats_answer", "run_list"))
@given(data=st.data())
@QUICK
def test_every_document_that_we_write_is_valid_by_its_published_schema(kind: str, data: st.DataObject) -> None:
    document = data.draw(documents(KINDS[kind]))
    assert repr(validate(document.model_dump_json())) == repr(document)
    assert repr(validate(document.model_dump_json(indent=1).encode())) == repr(document)
    assert repr(validate(to_xml(document))) == repr(document)


def test_a_document_with_a_byte_order_mark_or_space_before_it_is_read() -> None:
    for text in (REPORT.model_dump_json(), to_xml(REPORT)):
        assert validate(b"\xef\xbb\xbf" + text.encode()) == REPORT
        assert validate("\n  " + text) == REPORT


def changed(**values: object) -> str:
    return json.dumps(json.loads(REPORT.model_dump_json()) | values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected JSON .* or XML .*, got nothing"),
        ("[]", r"expected JSON .*, got '\[' first"),
        (b"\xff{}", "expected UTF-8, got 0xff at byte 0"),
        ("{", "not well-formed JSON: .*line 1 column 2"),
        ('{"a": 1, "a": 2}', "'a' comes twice"),
        ('{"a": NaN}', "NaN is no number in JSON"),
        ('{"a":' * 100_000, "not well-formed JSON"),
        ("{}", r"\$\.kind: expected a kind of document \(.*diagnosis, diagnostic_report.*got None"),
        ('{"kind": ["x"]}', r"\$\.kind: expected a kind of document"),
        ('{"kind": "run_manifest"}', "got 'run_manifest'"),
        (changed(num_steps=-1), r"^\$\.num_steps: -1 is less than the minimum of 0"),
        (changed(num_steps="2"), r"^\$\.num_steps: '2' is not of type 'integer'"),
        (changed(extra=1), r"\$: Additional properties are not allowed \('extra' was unexpected\)"),
        (changed(state="walking"), r"\$\.state: 'walking' is not one of"),
        (changed(schema_version="2"), r"\$\.schema_version: '1' was expected"),
        (changed(loss={"signal": "loss"}), r"\$\.loss: '\w+' is a required property"),
        (changed(started_at_s=0).replace('"started_at_s": 0', '"started_at_s": 1e999'), "started_at_s.*finite"),
        (REPORT.model_dump_json().replace('"summary":"All is well.",', ""), r"\$: 'summary' is a required property"),
        ("<run_manifest/>", "/run_manifest: expected a kind of document"),
        ("<diagnostic_report/>", "expected the element <diagnostic_report> in the namespace"),
        (to_xml(REPORT).replace("<num_steps>2", "<num_steps>x"), "line 10, /diagnostic_report/num_steps: expected"),
        ("<", "not well-formed XML"),
    ],
)
def test_what_is_no_document_is_refused_with_where_and_why(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidDocument, match=message) as caught:
        validate(text)
    assert len(str(caught.value)) < 600


def test_input_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xml, "MAX_BYTES", 10)
    for text in (REPORT.model_dump_json(), to_xml(REPORT)):
        for form in (text, text.encode()):
            with pytest.raises(InvalidDocument, match="at most 10 bytes"):
                validate(form)


def test_the_xsd_is_a_schema_for_other_validators_too() -> None:
    schema = etree.XMLSchema(etree.fromstring(schema_path(XSD_NAME).read_bytes()))
    schema.assertValid(etree.fromstring(to_xml(intervention((True, None), (1.5, "x")))))


def test_stale_missing_and_foreign_files_are_found_and_mended(tmp_path: Path) -> None:
    expected = {"a.json": "a\n", "b.json": "b\n"}
    assert stale(tmp_path / "none", expected) == ["a.json", "b.json"]
    assert write(tmp_path, expected) == ["a.json", "b.json"]
    assert write(tmp_path, expected) == []
    (tmp_path / "a.json").write_text("edited")
    (tmp_path / "b.json").unlink()
    (tmp_path / "old.json").write_text("{}")
    assert stale(tmp_path, expected) == ["a.json", "b.json", "old.json"]
    assert write(tmp_path, expected) == ["a.json", "b.json", "old.json"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == expected


@pytest.mark.slow
def test_check_names_stale_files_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert schemas.main(["--directory", str(tmp_path)]) == 0
    assert schemas.main(["--directory", str(tmp_path), "--check"]) == 0
    (tmp_path / XSD_NAME).write_text("edited")
    capsys.readouterr()
    assert schemas.main(["--directory", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / XSD_NAME} is stale" in said
    assert f"run: {COMMAND}" in said


@pytest.mark.slow
def test_the_command_finds_the_committed_schemas_current() -> None:
    done = subprocess.run([sys.executable, "-m", COMMAND.split()[-1], "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_schema_is_an_error_that_names_the_command() -> None:
    with pytest.raises(FileNotFoundError, match=COMMAND):
        schema_path("none.json")
