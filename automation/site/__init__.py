"""The documentation site: its settings for Sphinx, the pages that are made from the code, and the staging of documents.

Unlike the other modules of `automation`, these run in the environment `.nox/run`, because they import gdrkit.
"""

from __future__ import annotations

__all__: list[str] = []
