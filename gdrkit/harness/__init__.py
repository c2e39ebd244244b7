"""The pytest plugin: declared needs, peers, evidence, verdicts, records.

Level 7. A case declares what it needs before its body; what is not met keeps it from running, with every reason; inside
the body nothing skips. Turn it on with ``-p gdrkit.harness.plugin``. Importing this package imports neither pytest nor
any API: peers do it, too.
"""

from __future__ import annotations

__all__: list[str] = []
