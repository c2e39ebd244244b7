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
_SHOWN_MAX = 20
_WORDS = {
    Verdict.FAIL: "here",
    Verdict.UNPROVEN: "open",
    Verdict.PASS: "not here",
    Verdict.NOT_RUN: "not looked at",
}
_HEADS = {
    Verdict.FAIL: "Causes that are here",
    Verdict.UNPROVEN: "Left open by what could be read",
    Verdict.PASS: "Looked for, and not here",
    Verdict.NOT_RUN: "Not looked at",
}


def describe_diagnosis(found: Diagnosis, *, verbose: bool = False) -> str:
    """Return the causes first, each with what was read and what to do, then the other findings, one line each."""
    lines = [f"Missing here: {'; '.join(found.missing)}", ""] if found.missing else []
    for verdict, head in _HEADS.items():
        findings = found.of(verdict)
        if findings:
            lines.append(f"{head} ({len(findings)}):")
            for finding in findings:
                lines += _finding(finding, verbose=verbose or verdict is Verdict.FAIL)
            lines.append("")
    if found.privileges:
        lines += ["Not to be read without a privilege:", *(f"  {line}" for line in found.privileges), ""]
    lines += _unreadable(found)
    counts = [f"{len(found.of(verdict))} {_WORDS[verdict]}" for verdict in _HEADS]
    return "\n".join(
        [*lines, f"Of {len(found.findings)} known causes: {', '.join(counts)}. `gdrkit explain CODE` says more."]
    )


def _unreadable(found: Diagnosis) -> list[str]:
    # ENODATA marks a file that the capture does not contain. Such a file was not refused by the kernel.
    refused = [item for item in found.unreadable if item.errno != errno.ENODATA]
    lines = [f"Could not be read ({len(refused)}):"] if refused else []
    lines += [f"  {item.path}: {item.errno_name}" for item in refused[:_SHOWN_MAX]]
    lines += [f"  and {len(refused) - _SHOWN_MAX} more"] if len(refused) > _SHOWN_MAX else []
    if len(refused) < len(found.unreadable):
        lines.append(f"Not in the capture: {len(found.unreadable) - len(refused)} files.")
    return [*lines, ""] if lines else []


def _finding(finding: Finding, *, verbose: bool) -> Iterator[str]:
    yield from _wrapped(f"  {finding.code}: {finding.text}", "    ")
    for reading in finding.read if verbose else ():
        yield from _wrapped(f"      {reading.where}: {reading.what}", "        ")
    if finding.what_to_do:
        yield from _wrapped(f"    To do: {finding.what_to_do}", "      ")


def describe_rule(rule: Rule) -> str:
    """Return the full text of a rule."""
    rows = [("Why it matters", rule.why), ("What to do", rule.remedy), ("Looks at", rule.reads)]
    rows += [("Needs", rule.privilege)] if rule.privilege else []
    rows += [("Acts", "yes, in a child process with a time limit")] if rule.act else []
    lines = [f"{rule.code}: {rule.title}", ""]
    for name, text in rows:
        lines += _wrapped(f"{name}: {text}", "  ")
    return "\n".join(lines)


def list_rules(rules: Sequence[Rule]) -> str:
    """Return the rules, one per line."""
    width = max(len(rule.code) for rule in rules)
    return "\n".join(f"{rule.code:{width}}  {rule.title}{' (acts)' if rule.act else ''}" for rule in rules)


def rules_as_json(rules: Rule | Sequence[Rule]) -> str:
    """Return one rule as an indented JSON object, or several as a list of such objects."""
    found = [_rule_values(rule) for rule in rules] if not isinstance(rules, Rule) else _rule_values(rules)
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _rule_values(rule: Rule) -> dict[str, str | bool]:
    """Return the texts of a rule by the names of its fields. `acts` says whether the rule does more than read."""
    texts = {name: getattr(rule, name) for name in ("code", "title", "why", "remedy", "reads", "privilege")}
    return {**texts, "acts": bool(rule.act)}


def rules_document(rules: Sequence[Rule]) -> str:
    """Return the rules as the table of docs/doctor.md."""
    lines = ["| code | cause | looks at | what to do |", "|---|---|---|---|"]
    for rule in rules:
        where = (
            rule.reads + (f" (needs {rule.privilege})" if rule.privilege else "") + (" **acts**" if rule.act else "")
        )
        cells = (f"`{rule.code}`", rule.title, where, rule.remedy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width=_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [text]
