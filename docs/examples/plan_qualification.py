"""Plan a qualification and decide about a machine, from Python."""

from __future__ import annotations

import sys

from gdrkit import host, inventory, launch, qualify
from gdrkit.qualify.progress import LineProgress

options = qualify.Options(uses_only_twins=True)
plan = qualify.plan_only(options, LineProgress(sys.stderr))
print("the plan has", ", ".join(plan))

# Which nox sessions fit, by the hardware that is present and the twins that are installed.
sessions = qualify.fitting_sessions(launch.present_hardware(host.HostTree()), launch.twins_available())
print({name: entry["fits"] for name, entry in sessions.items()})

# Without any record, nothing is proven.
facts = inventory.probe(query_apis=False)
outcome = qualify.decide(facts, inventory.load_profile("any"), [], software_asked=False)
print(outcome.verdict, int(outcome.code))
assert outcome.code is not qualify.ExitCode.PROVEN

# The gate checks only the required routes, in a limited time, and prints one line.
if "--check" in sys.argv:
    result = qualify.check(options, budget_s=60)
    print(result.line)
    sys.exit(int(result.code))
