"""The pytest plugin for the suites of others; installed with gdrkit, and asleep until a project wakes it.

Level 7. A project says ``gdrkit = true`` in its settings of pytest, or ``--gdrkit`` on the command line. Then its cases
may declare needs and use the fixtures of the harness; those that do are looked after (needs, leaks, records), all
others are left alone. docs/plugin.md is for its users.
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
    """Add options, each with a prefix: this is loaded into every run of pytest beside which gdrkit is installed."""
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
    """Begin, where the project wants it and the suites of gdrkit do not run themselves."""
    if config.pluginmanager.has_plugin(_STRICT):
        return
    config.addinivalue_line("markers", f"{_MARK}(*needs): what a case needs; use gdrkit.harness.needs.needs")
    if _is_on(config):
        from gdrkit.harness.hooks import begin

        begin(config, strict=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A need that nobody looks at would be a case that fails for what it said it cannot do without."""
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
