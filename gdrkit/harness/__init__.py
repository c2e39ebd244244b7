"""The pytest plugin of the suites: declared needs, peer processes, evidence, leak checks, records.

A case declares its needs before its body. A case with an unmet need does not run, and its record has all reasons. The
body of a case must not skip. Importing this package imports neither pytest nor an API, because peer processes import it
as well.
"""

from __future__ import annotations

__all__: list[str] = []
