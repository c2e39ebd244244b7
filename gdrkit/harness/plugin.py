"""The pytest plugin of gdrkit's own suites: ``-p gdrkit.harness.plugin``.

The plugin is strict: the harness handles every case, and a case that skips itself fails. A need is what a case requires
of the machine. If a need is unmet and the profile of the machine does not list this absence as foreseen, the run fails.
:mod:`gdrkit.harness.user` is the plugin for suites of other projects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.harness.hooks import start_harness

if TYPE_CHECKING:
    import pytest

__all__: list[str] = []

# For each option: a placeholder for its value in the help of pytest, and its help text.
_OPTIONS = {
    "--substrate": (
        "SUBSTRATE",
        "fail unless the APIs run on this substrate: software (twins), hardware, or e.g. verbs=twin,cuda=hardware",
    ),
    "--profile": ("NAME", "the profile of this machine (hardware/profiles); by default the profile that fits best"),
    "--records": ("FILE", "append one JSON record per case to this file"),
    "--facts": ("FILE", "read the facts of this machine from this file and do not query the APIs"),
    "--plan": ("FILE", "write the collected cases with their unmet needs to this file"),
    "--command": ("TEXT", "the command line that the records contain; by default the command line of pytest"),
    "--cases": ("FILE", "run only the cases whose ids are in this file, one per line"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the harness."""
    group = parser.getgroup("gdrkit")
    for name, (metavar, help_text) in _OPTIONS.items():
        group.addoption(name, dest="gdrkit_" + name[2:], metavar=metavar, default=None, help=help_text)
    group.addoption(
        "--seed",
        dest="gdrkit_seed",
        metavar="N",
        type=int,
        default=None,
        help="the seed from which cases derive their data; random by default",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and start the harness in strict mode."""
    config.addinivalue_line("markers", "needs(*needs): the needs of a case; use gdrkit.harness.needs.needs")
    config.addinivalue_line("markers", "qualify: `gdrkit qualify` runs the case")
    start_harness(config, strict=True)
