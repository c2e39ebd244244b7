"""Plan a qualification, and derive its outcome from records."""

from __future__ import annotations

import sys

from gdrkit import host, inventory, launch, qualify
from gdrkit.qualify.progress import LineProgress

options = qualify.Options(uses_only_twins=True)
plan = qualify.plan_only(options, LineProgress(sys.stderr))
print("the plan has", ", ".join(plan))

# List the nox sessions, and whether each can run with the hardware and the twins of this machine.
sessions = qualify.list_nox_sessions(launch.present_hardware(host.HostTree()), launch.twins_available())
print({name: entry["fits"] for name, entry in sessions.items()})

# decide() derives the outcome from records. Without any record, nothing is proven.
facts = inventory.probe(query_apis=False)
outcome = qualify.decide(facts, inventory.load_profile("any"), [], uses_only_twins=False)
print(outcome.verdict, int(outcome.code))
assert outcome.code is not qualify.ExitCode.PROVEN

# check() tests the required routes within `budget_s` seconds, for example before a job starts. `line` of the result is
# a summary in one line.
if "--check" in sys.argv:
    result = qualify.check(options, budget_s=60)
    print(result.line)
    sys.exit(int(result.code))
