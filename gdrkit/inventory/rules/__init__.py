"""The causes for which a transfer is not direct, a rule each.

Level 4. A rule looks at one machine and answers with a verdict and a sentence; it is a pure function over what was read
of that machine, so that it answers on a captured one as it did there.
"""

from __future__ import annotations

from gdrkit.errors import UsageError
from gdrkit.inventory.rules import fabric, files, lifetime, ports, registration, storage
from gdrkit.inventory.rules.base import Finding, Reading, Rule

__all__ = ["RULES", "Finding", "Reading", "Rule", "rule_of"]

RULES: tuple[Rule, ...] = (
    *registration.RULES,
    *fabric.RULES,
    *ports.RULES,
    *storage.RULES,
    *files.RULES,
    *lifetime.RULES,
)


def rule_of(code: str) -> Rule:
    """The rule of that code.

    Raises
    ------
    UsageError
        There is none.
    """
    found = next((rule for rule in RULES if rule.code == code), None)
    if found is None:
        message = f"no rule {code!r}"
        raise UsageError(message, what_to_do="`gdrkit explain` lists them all")
    return found
