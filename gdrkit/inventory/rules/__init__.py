"""Rules of the doctor, one for each known cause of a transfer that is not direct.

A rule examines one machine and returns a verdict and a sentence. The result depends only on what was read and observed
on that machine, so a rule returns the same result for a capture of the machine.
"""

from __future__ import annotations

from gdrkit.errors import UsageError
from gdrkit.inventory.rules import age, fabric, files, lifetime, ports, processes, registration, storage
from gdrkit.inventory.rules.base import Finding, Reading, Rule

__all__ = ["RULES", "Finding", "Reading", "Rule", "rule_of"]

RULES: tuple[Rule, ...] = (
    *registration.RULES,
    *age.RULES,
    *fabric.RULES,
    *ports.RULES,
    *processes.RULES,
    *storage.RULES,
    *files.RULES,
    *lifetime.RULES,
)


def rule_of(code: str) -> Rule:
    """Return the rule with this code.

    Raises
    ------
    UsageError
        There is no rule with this code.
    """
    for rule in RULES:
        if rule.code == code:
            return rule
    message = f"there is no rule {code!r}"
    raise UsageError(message, what_to_do="`gdrkit explain` lists all rules")
