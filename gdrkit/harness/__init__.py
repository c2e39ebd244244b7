"""The pytest plugin that runs the test cases of gdrkit and of other projects.

A case declares by ``@needs(...)`` what it requires of the machine. A case with an unmet need does not run, and its
record has all reasons. A case must not skip itself. The plugin also gives cases a second process (a *peer*), detects
objects that a case left open, and writes one record per case. Importing this package imports neither pytest nor an API,
because the peer processes import it as well.
"""

from __future__ import annotations

__all__: list[str] = []
