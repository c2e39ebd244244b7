"""The pytest plugin for suites of other projects. It is installed with gdrkit, and inactive until a project enables it.

A project enables it by ``gdrkit = true`` in its pytest settings, or by ``--gdrkit`` on the command line. Then its cases
may declare needs and use the fixtures of the harness. The plugin handles needs, leaks and records of those cases and
ignores all others. The user manual is docs/plugin.md.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

_STRICT = "gdrkit.harness.plugin"
_MARK = "needs"
_OPTIONS = {
    "--gdrkit-substrate": (
        "WANTED",
        "fail unless the APIs run on this: software, hardware, or verbs=twin,cuda=hardware",
    ),
    "--gdrkit-profile": ("NAME", "fail what this profile of a machine does not foresee"),
    "--gdrkit-records": ("FILE", "append one JSON record for each case that the plugin looks after"),
    "--gdrkit-facts": ("FILE", "take the facts about this machine from here and ask no API for them"),
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add options with a prefix, because every pytest run in an environment with gdrkit loads this plugin."""
    parser.addini(
        "gdrkit", "whether cases may declare needs of gdrkit and use its fixtures", type="bool", default=False
    )
    if pluginmanager.has_plugin(_STRICT):
        return
    group = parser.getgroup("gdrkit")
    group.addoption("--gdrkit", action="store_true", help="let cases declare needs of gdrkit and use its fixtures")
    for name, (metavar, text) in _OPTIONS.items():
        group.addoption(name, dest=name[2:].replace("-", "_"), metavar=metavar, default=None, help=text)
    group.addoption(
        "--gdrkit-seed", dest="gdrkit_seed", metavar="N", type=int, default=None, help="of the fixture `seed`"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the harness if the project enables it and the run is not one of gdrkit's own suites."""
    if config.pluginmanager.has_plugin(_STRICT):
        return
    config.addinivalue_line("markers", f"{_MARK}(*needs): what a case needs; use gdrkit.harness.needs.needs")
    if _is_on(config):
        from gdrkit.harness.hooks import begin

        begin(config, strict=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run cases that declare needs while the plugin is off, because nothing would check these needs."""
    if config.pluginmanager.has_plugin(_STRICT) or _is_on(config):
        return
    for item in items:
        mark = item.get_closest_marker(_MARK)
        if mark is not None and any(type(need).__module__.startswith("gdrkit.") for need in mark.args):
            what_to_do = "add gdrkit = true to the settings of pytest, or --gdrkit"
            message = f"{item.nodeid} declares needs of gdrkit, and its plugin is off. To do: {what_to_do}"
            raise pytest.UsageError(message)


def _is_on(config: pytest.Config) -> bool:
    return bool(config.getoption("gdrkit", default=False) or config.getini("gdrkit"))
