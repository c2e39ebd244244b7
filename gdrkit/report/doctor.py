"""Text of ``gdrkit doctor`` and ``gdrkit explain``: the findings of the doctor on a machine, and its rules.

A rule describes one possible cause of a problem, such as a kernel module that is not loaded. A finding says whether
that cause is present on the machine: the verdict FAIL means present.
"""

from __future__ import annotations

import errno
import json
import textwrap
from typing import TYPE_CHECKING

from gdrkit.inventory import Rule
from gdrkit.text import escape_controls, format_count
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory import Diagnosis, Finding

__all__ = ["describe_diagnosis", "describe_rule", "list_rules", "rules_as_json", "rules_document"]

_LINE_WIDTH = 112
_LISTED_PATHS_MAX = 20
_COUNT_LABELS = {
    Verdict.FAIL: "present",
    Verdict.UNPROVEN: "undecided",
    Verdict.PASS: "absent",
    Verdict.NOT_RUN: "not checked",
}
_HEADINGS = {
    Verdict.FAIL: "Present",
    Verdict.UNPROVEN: "Undecided",
    Verdict.PASS: "Absent",
    Verdict.NOT_RUN: "Not checked",
}


def describe_diagnosis(diagnosis: Diagnosis, *, verbose: bool = False) -> str:
    """Describe all findings. Present causes come first, with the values that the doctor read.

    With `verbose`, the text has these values for all causes. Control characters are escaped, because the name of a
    process or a message of the kernel may contain them.
    """
    lines = [f"Missing on this machine: {'; '.join(diagnosis.missing)}", ""] if diagnosis.missing else []
    for verdict, heading in _HEADINGS.items():
        findings = diagnosis.findings_with(verdict)
        if findings:
            lines.append(f"{heading} ({len(findings)}):")
            for finding in findings:
                lines += _describe_finding(finding, verbose=verbose or verdict is Verdict.FAIL)
            lines.append("")
    if diagnosis.privileges:
        lines += ["Not readable without a privilege:", *(f"  {line}" for line in diagnosis.privileges), ""]
    lines += _describe_unreadable(diagnosis)
    counts = ", ".join(f"{len(diagnosis.findings_with(verdict))} {label}" for verdict, label in _COUNT_LABELS.items())
    lines.append(f"{len(diagnosis.findings)} known causes: {counts}. `gdrkit explain CODE` describes a cause.")
    return escape_controls("\n".join(lines))


def _describe_unreadable(diagnosis: Diagnosis) -> list[str]:
    # When the doctor examines the capture of another machine, ENODATA means that the capture does not have the file.
    # Any other errno says why the kernel of the examined machine refused to read the file.
    unreadable_files = [
        unreadable_file for unreadable_file in diagnosis.unreadable if unreadable_file.errno != errno.ENODATA
    ]
    lines = [f"Not readable ({len(unreadable_files)}):"] if unreadable_files else []
    lines += [
        f"  {unreadable_file.path}: {unreadable_file.errno_name}"
        for unreadable_file in unreadable_files[:_LISTED_PATHS_MAX]
    ]
    lines += (
        [f"  and {len(unreadable_files) - _LISTED_PATHS_MAX} more"] if len(unreadable_files) > _LISTED_PATHS_MAX else []
    )
    if len(unreadable_files) < len(diagnosis.unreadable):
        lines.append(f"Not in the capture: {format_count(len(diagnosis.unreadable) - len(unreadable_files), 'file')}.")
    return [*lines, ""] if lines else []


def _describe_finding(finding: Finding, *, verbose: bool) -> Iterator[str]:
    yield from _wrap(f"  {finding.code}: {finding.text}", "    ")
    for reading in finding.read if verbose else ():
        yield from _wrap(f"      {reading.where}: {reading.what}", "        ")
    if finding.what_to_do:
        yield from _wrap(f"    To do: {finding.what_to_do}", "      ")


def describe_rule(rule: Rule) -> str:
    """Return the full text of a rule."""
    rows = [("Why it matters", rule.why), ("What to do", rule.remedy), ("Reads", rule.reads)]
    rows += [("Needs", rule.privilege)] if rule.privilege else []
    rows += [("Experiment", "yes, in a child process with a time limit")] if rule.experiment else []
    rows += [("Source", rule.source)] if rule.source else []
    lines = [f"{rule.code}: {rule.title}", ""]
    for name, text in rows:
        lines += _wrap(f"{name}: {text}", "  ")
    return "\n".join(lines)


def list_rules(rules: Sequence[Rule]) -> str:
    """Return the rules, one per line."""
    width = max(len(rule.code) for rule in rules)
    return "\n".join(f"{rule.code:{width}}  {rule.title}{' (experiment)' if rule.experiment else ''}" for rule in rules)


def rules_as_json(rules: Rule | Sequence[Rule]) -> str:
    """Return one rule as an indented JSON object, or several rules as a list of such objects."""
    fields = _make_rule_fields(rules) if isinstance(rules, Rule) else [_make_rule_fields(rule) for rule in rules]
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _make_rule_fields(rule: Rule) -> dict[str, str | bool]:
    """Return the fields of a rule. ``acts`` says whether the rule makes an experiment on the machine."""
    texts = {name: getattr(rule, name) for name in ("code", "title", "why", "remedy", "reads", "privilege", "source")}
    return {**texts, "acts": bool(rule.experiment)}


def rules_document(rules: Sequence[Rule]) -> str:
    """Return the rules as a Markdown table, which docs/doctor.md contains."""
    lines = ["| code | cause | reads | what to do |", "|---|---|---|---|"]
    for rule in rules:
        privilege = f" (needs {rule.privilege})" if rule.privilege else ""
        experiment = " **experiment**" if rule.experiment else ""
        cells = (f"`{rule.code}`", rule.title, rule.reads + privilege + experiment, rule.remedy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _wrap(text: str, continuation_indent: str) -> list[str]:
    return textwrap.wrap(
        text, width=_LINE_WIDTH, subsequent_indent=continuation_indent, break_long_words=False, break_on_hyphens=False
    ) or [text]
