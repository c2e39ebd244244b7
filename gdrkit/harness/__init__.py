"""The pytest plugin: declared needs, peers, evidence, verdicts, records.

A case declares its needs before its body. A case with an unmet need does not run, and its record has every reason. Code
inside the body must not skip. Enable the plugin with ``-p gdrkit.harness.plugin``. Importing this package imports
neither pytest nor any API, because peer processes import it, too.
"""

from __future__ import annotations

__all__: list[str] = []
