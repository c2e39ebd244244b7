"""The findings of the doctor and its rules as text."""

from __future__ import annotations

import errno
import json
import textwrap
from typing import TYPE_CHECKING

from gdrkit.inventory import Rule
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory import Diagnosis, Finding

__all__ = ["describe_diagnosis", "describe_rule", "list_rules", "rules_as_json", "rules_document"]

_WIDTH = 112
_PATHS_MAX = 20
_WORDS = {
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
    """Return the present causes with the values that were read and the remedy, then a line for each other cause."""
    lines = [f"Missing on this machine: {'; '.join(diagnosis.missing)}", ""] if diagnosis.missing else []
    for verdict, heading in _HEADINGS.items():
        findings = diagnosis.of(verdict)
        if findings:
            lines.append(f"{heading} ({len(findings)}):")
            for finding in findings:
                lines += _finding(finding, verbose=verbose or verdict is Verdict.FAIL)
            lines.append("")
    if diagnosis.privileges:
        lines += ["Not readable without a privilege:", *(f"  {line}" for line in diagnosis.privileges), ""]
    lines += _unreadable(diagnosis)
    counts = ", ".join(f"{len(diagnosis.of(verdict))} {word}" for verdict, word in _WORDS.items())
    lines.append(f"{len(diagnosis.findings)} known causes: {counts}. `gdrkit explain CODE` describes a cause.")
    return "\n".join(lines)


def _unreadable(diagnosis: Diagnosis) -> list[str]:
    # ENODATA marks a file that the capture does not contain. Such a file was not refused by the kernel.
    refused = [item for item in diagnosis.unreadable if item.errno != errno.ENODATA]
    lines = [f"Not readable ({len(refused)}):"] if refused else []
    lines += [f"  {item.path}: {item.errno_name}" for item in refused[:_PATHS_MAX]]
    lines += [f"  and {len(refused) - _PATHS_MAX} more"] if len(refused) > _PATHS_MAX else []
    if len(refused) < len(diagnosis.unreadable):
        lines.append(f"Not in the capture: {len(diagnosis.unreadable) - len(refused)} files.")
    return [*lines, ""] if lines else []


def _finding(finding: Finding, *, verbose: bool) -> Iterator[str]:
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
    lines = [f"{rule.code}: {rule.title}", ""]
    for name, text in rows:
        lines += _wrap(f"{name}: {text}", "  ")
    return "\n".join(lines)


def list_rules(rules: Sequence[Rule]) -> str:
    """Return the rules, one per line."""
    width = max(len(rule.code) for rule in rules)
    return "\n".join(f"{rule.code:{width}}  {rule.title}{' (experiment)' if rule.experiment else ''}" for rule in rules)


def rules_as_json(rules: Rule | Sequence[Rule]) -> str:
    """Return one rule as an indented JSON object, or several as a list of such objects."""
    values = _rule_values(rules) if isinstance(rules, Rule) else [_rule_values(rule) for rule in rules]
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _rule_values(rule: Rule) -> dict[str, str | bool]:
    """Return the texts of a rule by the names of its fields. `acts` states whether the rule needs an experiment."""
    texts = {name: getattr(rule, name) for name in ("code", "title", "why", "remedy", "reads", "privilege")}
    return {**texts, "acts": bool(rule.experiment)}


def rules_document(rules: Sequence[Rule]) -> str:
    """Return the rules as the table of docs/doctor.md."""
    lines = ["| code | cause | reads | what to do |", "|---|---|---|---|"]
    for rule in rules:
        privilege = f" (needs {rule.privilege})" if rule.privilege else ""
        experiment = " **experiment**" if rule.experiment else ""
        cells = (f"`{rule.code}`", rule.title, rule.reads + privilege + experiment, rule.remedy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width=_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [text]
