from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lxml import etree

from gradtracer import xml
from gradtracer.errors import InvalidDocument, UsageError
from gradtracer.records import (
    Change,
    DiagnosticReport,
    Document,
    Intervention,
    MetricSeries,
    Name,
    ParameterScalar,
    Point,
    RunManifest,
    RunStatus,
    TcpAddress,
    UnixAddress,
)
from gradtracer.schemas import documents as kinds
from gradtracer.xml import from_xml, to_xml
from tests.documents.strategies import NASTY, documents
from tests.families import family

XSD = etree.XMLSchema(etree.fromstring(xml.xsd(kinds().values()).encode()))
QUICK = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), derandomize=True)

REPORT = DiagnosticReport(
    run_id="r1",
    name="demo",
    state="running",  # pyright: ignore[reportArgumentType]
    generated_at_s=2.0,
    started_at_s=1.0,
    num_steps=2,
    summary="All is well.",
    loss=MetricSeries(signal="loss", num_recorded=2, points=(Point(step=1, value=0.1), Point(step=2, value=None))),
)


def intervention(*changes: tuple[ParameterScalar, ParameterScalar], reason: str = "") -> Intervention:
    return Intervention(
        id="i1",
        run_id="r1",
        fix="set_learning_rate",
        mode="apply",
        requester="agent",
        reason=reason,
        state="applied",  # pyright: ignore[reportArgumentType]
        requested_at_s=1.5,
        changes=tuple(Change(target="lr", old=old, new=new) for old, new in changes),
    )


@pytest.mark.parametrize("kind", family(sorted(kinds()), "layer_stats_answer", "run_list"))
@given(data=st.data())
@QUICK
def test_json_and_xml_and_back_are_exact(kind: str, data: st.DataObject) -> None:
    model = kinds()[kind]
    document = data.draw(documents(model))
    text = to_xml(document)
    back = from_xml(text, model)
    # repr tells -0.0 from 0.0 and True from 1, which == does not.
    assert repr(back) == repr(document)
    assert repr(from_xml(text.encode(), model)) == repr(document)
    assert repr(model.model_validate_json(back.model_dump_json())) == repr(document)
    XSD.assertValid(etree.fromstring(text))


@given(documents(RunManifest))
@QUICK
def test_a_union_of_records_comes_back_as_the_same_record(manifest: RunManifest) -> None:
    # The path of a socket is not cleaned, so it may hold what no XML can.
    address = manifest.address
    if isinstance(address, UnixAddress):
        address = UnixAddress(path="/run/<a & b>.sock")
    manifest = manifest.model_copy(update={"address": address, "token": "t"})
    assert repr(from_xml(to_xml(manifest), RunManifest)) == repr(manifest)


def test_the_members_of_a_union_are_told_apart_by_xsi_type() -> None:
    manifest = RunManifest(
        run_id="r", name="n", pid=1, pid_created_s=0.0, started_at_s=0.0, track_interval=1, address=TcpAddress(port=80)
    )
    text = to_xml(manifest)
    assert '<address xsi:type="TcpAddress">' in text
    with pytest.raises(
        InvalidDocument, match=r"/run_manifest/address/transport: expected one of unix, got 'tcp'|<path>"
    ):
        from_xml(text.replace("TcpAddress", "UnixAddress"), RunManifest)


@pytest.mark.parametrize("name", NASTY)
def test_names_of_layers_come_back_exactly(name: str) -> None:
    report = REPORT.model_copy(update={"loss": MetricSeries(signal="loss", layer=name, num_recorded=0, points=())})
    assert from_xml(to_xml(report), DiagnosticReport) == report
    assert "\r" not in to_xml(report)


def test_null_empty_text_and_empty_list_differ() -> None:
    text = to_xml(REPORT)
    assert '<error xsi:nil="true"/>' in text
    assert "<optimizer></optimizer>" in text
    assert "<layers/>" in text
    empty = REPORT.model_copy(update={"error": ""})
    assert from_xml(to_xml(empty), DiagnosticReport).error == ""
    assert from_xml(text, DiagnosticReport).error is None


def test_values_of_several_types_keep_their_type() -> None:
    there = intervention((True, 1), (1.0, "1"), (None, ""), (-0.0, 10**40), ("true", False), (5e-324, 0.1 + 0.2))
    back = from_xml(to_xml(there), Intervention)
    assert [(repr(c.old), repr(c.new)) for c in back.changes] == [
        ("True", "1"),
        ("1.0", "'1'"),
        ("None", "''"),
        ("-0.0", str(10**40)),
        ("'true'", "False"),
        ("5e-324", "0.30000000000000004"),
    ]


def test_xml_is_element_for_element_with_the_json() -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return [(name, shape(v)) for name, v in value.items()]
        return [("item", shape(v)) for v in value] if isinstance(value, list) else []

    def elements(element: etree._Element) -> Any:
        return [(etree.QName(child).localname, elements(child)) for child in element]

    there = REPORT.model_copy(update={"interventions": (intervention((1, 2)),)})
    assert elements(etree.fromstring(to_xml(there))) == shape(json.loads(there.model_dump_json()))


def test_text_from_another_writer_reads_the_same() -> None:
    text = to_xml(intervention((1, 2), reason="a < b"))
    other = "\ufeff<?xml version='1.0' encoding='UTF-8'?>\n<!-- by hand -->\n" + text.replace(
        "a &lt; b", "<![CDATA[a < ]]><!-- here -->b"
    ).replace(">1</old>", "> +01\n</old>")
    assert from_xml(other, Intervention) == intervention((1, 2), reason="a < b")


def test_what_xml_cannot_express_is_refused_with_its_field() -> None:
    manifest = RunManifest(
        run_id="r", name="n", pid=1, pid_created_s=0.0, started_at_s=0.0, track_interval=1, token="\x00"
    )
    with pytest.raises(InvalidDocument, match="field token"):
        to_xml(manifest)


BILLION_LAUGHS = (
    "<!DOCTYPE diagnostic_report ["
    + '<!ENTITY l0 "lol">'
    + "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
    + "]>"
)


@pytest.mark.parametrize(
    "doctype",
    [
        "<!DOCTYPE diagnostic_report>",
        '<!DOCTYPE diagnostic_report SYSTEM "file:///etc/passwd">',
        '<!DOCTYPE diagnostic_report PUBLIC "-//x" "http://127.0.0.1:9/x.dtd">',
        '<!DOCTYPE diagnostic_report [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE diagnostic_report [<!ENTITY % x SYSTEM "http://127.0.0.1:9/x.dtd"> %x;]>',
        BILLION_LAUGHS,
    ],
)
@pytest.mark.parametrize("summary", ["All is well.", "&l9;", "&x;"])
def test_a_doctype_and_its_entities_are_refused(doctype: str, summary: str) -> None:
    text = doctype + to_xml(REPORT).replace("All is well.", summary)
    with pytest.raises(InvalidDocument, match=r"DOCTYPE|well-formed") as caught:
        from_xml(text, DiagnosticReport)
    assert "root:" not in str(caught.value)


def test_entities_in_attributes_are_refused() -> None:
    text = BILLION_LAUGHS + to_xml(REPORT).replace('xsi:nil="true"', 'xsi:nil="&l9;"')
    with pytest.raises(InvalidDocument):
        from_xml(text, DiagnosticReport)


def test_input_is_bounded_in_size_depth_and_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidDocument, match=r"not well-formed.*[Dd]epth"):
        from_xml("<a>" * 100_000, DiagnosticReport)
    monkeypatch.setattr(xml, "MAX_TAGS", 10)
    with pytest.raises(InvalidDocument, match="at most 10 tags of XML, got"):
        from_xml(to_xml(REPORT), DiagnosticReport)
    monkeypatch.setattr(xml, "MAX_BYTES", 100)
    with pytest.raises(InvalidDocument, match="at most 100 bytes of XML, got"):
        from_xml(to_xml(REPORT), DiagnosticReport)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<step>1</step>", "<step>one</step>", r"^line 23, /diagnostic_report/loss/points/item\[1\]/step: .*'one'"),
        ("<step>1</step>", "<step>1_0</step>", "xs:integer"),
        ("<step>1</step>", "<step>١</step>", "xs:integer"),
        ("<step>1</step>", "<step>" + "9" * 5000 + "</step>", r"item\[1\]/step: .*digits"),
        ("<step>1</step>", "<step>-1</step>", r"line 23, .*item\[1\]/step: .*greater than or equal to 0"),
        ("<step>1</step>", "", r"item\[1\]: expected <step> here, got <value>"),
        ("<step>1</step>", "<step>1</step><step>1</step>", "expected <value> here, got <step>"),
        ("<step>1</step>", "<step>1<b/></step>", "expected text only, got <b>"),
        ("<step>1</step>", '<step unit="s">1</step>', "no further attribute, got 'unit'"),
        ("<step>1</step>", '<step xsi:nil="true"/>', "no further attribute"),
        ("<value>0.1</value>", "<value>NaN</value>", "xs:double, finite, got 'NaN'"),
        ("<value>0.1</value>", "<value>INF</value>", "xs:double, finite"),
        ("<value>0.1</value>", "<value>1e999</value>", "finite number"),
        ("<value>0.1</value>", '<value xsi:nil="true">0.1</value>', "nothing inside an element with xsi:nil"),
        ("<value>0.1</value>", '<value xsi:nil="maybe">0.1</value>', "xsi:nil to be true or false"),
        ("<points>", "<points>words", "expected elements only, got 'words'"),
        ("<points>", "<points><step/>", "expected <item>, got <step>"),
        ("<state>running</state>", "<state>walking</state>", "report/state: expected one of running, paused"),
        (' <error xsi:nil="true"/>\n', "", "/diagnostic_report: expected <error>, got the end"),
        ("</diagnostic_report>", "<more/></diagnostic_report>", "expected no further element, got <more>"),
        ("</diagnostic_report>", "", "not well-formed XML: .*line"),
        (":records:1", ":records:2", r"<diagnostic_report> in the namespace urn:gradtracer:records:1"),
        ("<kind>diagnostic_report", "<kind>diagnosis", "expected one of diagnostic_report, got 'diagnosis'"),
        ("xmlns=", "version='1' xmlns=", "no further attribute, got 'version'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line_and_path(old: str, new: str, message: str) -> None:
    text = to_xml(REPORT)
    assert old in text
    with pytest.raises(InvalidDocument, match=message) as caught:
        from_xml(text.replace(old, new), DiagnosticReport)
    assert len(str(caught.value)) < 500
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("written", ["", 'xsi:type="xs:date"', 'xsi:type="integer"', 'xsi:type="no:integer"'])
def test_a_value_of_an_unknown_type_is_refused(written: str) -> None:
    text = to_xml(intervention((1, 2))).replace('<old xsi:type="xs:integer">', f"<old {written}>")
    with pytest.raises(
        InvalidDocument, match=r"item\[1\]/old: expected xsi:type to be one of boolean, integer, double"
    ):
        from_xml(text, Intervention)


def test_another_document_than_expected_is_refused() -> None:
    with pytest.raises(InvalidDocument, match=r"expected the element <run_status>.*got <diagnostic_report>"):
        from_xml(to_xml(REPORT), RunStatus)


@pytest.mark.parametrize("text", ["", "no xml", b"\xff\xfe", b"<a>\xff</a>", "<a/>" * 2])
def test_what_is_no_xml_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidDocument, match="not well-formed"):
        from_xml(text, DiagnosticReport)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<step>1</step>", "<step>-1</step>"),
        ("<step>1</step>", "<step>x</step>"),
        ("<step>1</step>", ""),
        ("<value>0.1</value>", "<value>NaN</value>"),
        ("<state>running</state>", "<state>walking</state>"),
        ("</diagnostic_report>", "<more/></diagnostic_report>"),
        ('<error xsi:nil="true"/>', "<error><b/></error>"),
        ('<new xsi:type="xs:integer">2</new>', '<new xsi:type="xs:date">2020-01-01</new>'),
        ('<new xsi:type="xs:integer">2</new>', '<new xsi:type="xs:integer">2.5</new>'),
    ],
)
def test_the_xsd_refuses_what_the_reader_refuses(old: str, new: str) -> None:
    text = to_xml(REPORT.model_copy(update={"interventions": (intervention((1, 2)),)}))
    assert XSD.validate(etree.fromstring(text))
    assert old in text
    text = text.replace(old, new)
    assert not XSD.validate(etree.fromstring(text))
    with pytest.raises(InvalidDocument):
        from_xml(text, DiagnosticReport)


def test_a_field_that_has_no_form_in_xml_is_refused_where_it_is_declared() -> None:
    class Keyed(Document):
        published = False
        kind: Literal["keyed"] = "keyed"
        by_layer: dict[str, float]

    class Mixed(Document):
        published = False
        kind: Literal["mixed"] = "mixed"
        value: Point | Name

    with pytest.raises(TypeError, match="no form for dict"):
        to_xml(Keyed(by_layer={"fc": 1.0}))
    with pytest.raises(TypeError, match="atoms only or of records only"):
        to_xml(Mixed(value="x"))
