"""The pytest plugin of gdrkit's own suites: ``-p gdrkit.harness.plugin``.

It is strict: every case of the run belongs to the harness, no case skips itself, and an unmet need that the profile
does not foresee fails the run. :mod:`gdrkit.harness.user` is the plugin for the suites of other projects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.harness.hooks import begin

if TYPE_CHECKING:
    import pytest

__all__: list[str] = []

_OPTIONS = {
    "--substrate": ("WANTED", "fail unless the APIs run on this: software, hardware, or e.g. verbs=twin,cuda=hardware"),
    "--profile": ("NAME", "the profile of this machine (hardware/profiles); the one that fits best when left out"),
    "--records": ("FILE", "append one JSON record per case"),
    "--facts": ("FILE", "take the facts about this machine from here and ask no API for them"),
    "--plan": ("FILE", "write the collected cases, and their needs that are not met"),
    "--command": ("TEXT", "what to name as the command of this run in its records"),
    "--cases": ("FILE", "run only the cases whose ids are in this file, one a line"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the harness."""
    group = parser.getgroup("gdrkit")
    for name, (metavar, text) in _OPTIONS.items():
        group.addoption(name, dest="gdrkit_" + name[2:], metavar=metavar, default=None, help=text)
    group.addoption(
        "--seed", dest="gdrkit_seed", metavar="N", type=int, default=None, help="of payloads; drawn when left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and start the harness in strict mode."""
    config.addinivalue_line("markers", "needs(*needs): what a case needs; use gdrkit.harness.needs.needs")
    config.addinivalue_line("markers", "qualify: the case belongs to `gdrkit qualify`")
    begin(config, strict=True)
