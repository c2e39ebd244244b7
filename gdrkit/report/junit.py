"""Writer of junit.xml, the report of a run for CI systems.

JUnit has no verdict ``unproven``. An unproven case is a passed test with a property ``unproven`` that has the reason. A
case that did not run is ``skipped`` if the profile foresees that, else a failure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from gdrkit.report.record import Verdict
from gdrkit.text import escape_controls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.report.record import Record
    from gdrkit.report.run import Run

__all__ = ["render_junit"]

# XML 1.0 cannot contain these characters, not even escaped.
_NOT_ALLOWED_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(run: Run, records: Sequence[Record]) -> bytes:
    """Return the contents of junit.xml in UTF-8."""
    failed_count = sum(record.is_failure for record in records)
    skipped_count = sum(record.verdict is Verdict.NOT_RUN and not record.is_failure for record in records)
    count_attributes = {
        "tests": str(len(records)),
        "failures": str(failed_count),
        "errors": "0",
        "skipped": str(skipped_count),
    }
    seconds_text = f"{sum(record.duration_ms for record in records) / 1000:.3f}"
    root = ET.Element("testsuites", {"name": "gdrkit qualify", **count_attributes, "time": seconds_text})
    suite_element = ET.SubElement(
        root,
        "testsuite",
        {
            "name": _clean_text(run.profile),
            "timestamp": run.started.rstrip("Z"),
            **count_attributes,
            "time": seconds_text,
        },
    )
    properties = ET.SubElement(suite_element, "properties")
    property_values = {
        "verdict": run.verdict,
        "state": run.state.value,
        "banner": run.banner,
        "seed": str(run.seed),
        "commit": run.commit or "unknown",
    }
    if run.host:
        property_values["host"] = run.host
    property_values |= {f"substrate.{api}": substrate for api, substrate in run.substrate.items()}
    for name, value in property_values.items():
        ET.SubElement(properties, "property", {"name": name, "value": _clean_text(value)})
    for record in records:
        _add_case(suite_element, record)
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _add_case(suite_element: ET.Element, record: Record) -> None:
    file, _, case_name = record.case.partition("::")
    attributes = {
        "classname": _clean_text(file.removesuffix(".py").replace("/", ".")),
        "name": _clean_text(case_name or file),
        "time": f"{record.duration_ms / 1000:.3f}",
    }
    case_element = ET.SubElement(suite_element, "testcase", attributes)
    properties = ET.SubElement(case_element, "properties")
    ET.SubElement(properties, "property", {"name": "verdict", "value": record.verdict.value})
    # The case failed with exactly the error that the profile expects for an unmet need of the case.
    if record.is_expected_refusal:
        ET.SubElement(properties, "property", {"name": "refused", "value": "as expected"})
    for api, substrate in sorted(record.substrate.items()):
        ET.SubElement(properties, "property", {"name": f"substrate.{api}", "value": substrate})
    reasons_text = _clean_text("; ".join(reason.text for reason in record.reasons))
    if record.is_failure:
        failure_element = ET.SubElement(
            case_element, "failure", {"message": reasons_text, "type": record.verdict.value}
        )
        failure_element.text = _clean_text(str(record.evidence.get("traceback", "")))
    elif record.verdict is Verdict.NOT_RUN:
        ET.SubElement(case_element, "skipped", {"message": reasons_text})
    elif record.verdict is Verdict.UNPROVEN:
        ET.SubElement(properties, "property", {"name": "unproven", "value": reasons_text})


def _clean_text(text: str) -> str:
    """Return the text with control characters as escapes, and without characters that XML cannot contain."""
    return _NOT_ALLOWED_IN_XML.sub("\N{REPLACEMENT CHARACTER}", escape_controls(text))
