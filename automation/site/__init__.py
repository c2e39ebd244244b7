"""The documentation site: its settings for Sphinx, the pages that are made from the code, and the staging of documents.

The modules of this package import gdrkit, so they run in the environment `.nox/run`. The other modules of
`automation` run outside that environment.
"""

from __future__ import annotations

__all__: list[str] = []
