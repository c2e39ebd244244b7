"""Entry point of ``python -m gdrkit``."""

from __future__ import annotations

from gdrkit.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
