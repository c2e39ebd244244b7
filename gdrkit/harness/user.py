"""The pytest plugin for the tests of other projects. It is installed with gdrkit, and inactive until it is enabled.

A project enables it by ``gdrkit = true`` in its pytest settings, or a user by ``--gdrkit`` on the command line. The
test cases of the project may then declare needs and use the fixtures of the harness. The plugin does not change other
cases. The user manual is docs/plugin.md.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

_STRICT_PLUGIN = "gdrkit.harness.plugin"
_NEEDS_MARK = "needs"
# For each option: a placeholder for its value in the help of pytest, and its help text.
_OPTIONS = {
    "--gdrkit-substrate": (
        "SUBSTRATE",
        "fail unless the APIs run on this substrate: software (twins), hardware, or e.g. verbs=twin,cuda=hardware",
    ),
    "--gdrkit-profile": (
        "NAME",
        "fail if a case does not run for a reason that this profile of a machine does not foresee",
    ),
    "--gdrkit-records": ("FILE", "append to this file one JSON record for each case that the plugin handles"),
    "--gdrkit-facts": ("FILE", "read the facts of this machine from this file and do not query the APIs"),
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options. They begin with ``--gdrkit``, so that they collide with no option of another plugin.

    Collisions matter because pytest loads this plugin wherever gdrkit is installed, even if it is not enabled.
    """
    parser.addini(
        "gdrkit", "whether cases may declare needs of gdrkit and use its fixtures", type="bool", default=False
    )
    if pluginmanager.has_plugin(_STRICT_PLUGIN):
        return  # The strict plugin adds its own options.
    group = parser.getgroup("gdrkit")
    group.addoption("--gdrkit", action="store_true", help="let cases declare needs of gdrkit and use its fixtures")
    for name, (metavar, help_text) in _OPTIONS.items():
        group.addoption(name, dest=name[2:].replace("-", "_"), metavar=metavar, default=None, help=help_text)
    group.addoption(
        "--gdrkit-seed",
        dest="gdrkit_seed",
        metavar="N",
        type=int,
        default=None,
        help="the seed of the fixture `seed`; random by default",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the harness if it is enabled, except in a run of gdrkit's suites, which use the strict plugin."""
    if config.pluginmanager.has_plugin(_STRICT_PLUGIN):
        return
    config.addinivalue_line("markers", f"{_NEEDS_MARK}(*needs): the needs of a case; use gdrkit.harness.needs.needs")
    if _is_enabled(config):
        from gdrkit.harness.hooks import start_harness

        start_harness(config, strict=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run cases that declare needs while the plugin is disabled, because their needs would not be checked."""
    if config.pluginmanager.has_plugin(_STRICT_PLUGIN) or _is_enabled(config):
        return
    for item in items:
        marker = item.get_closest_marker(_NEEDS_MARK)
        if marker is not None and any(type(need).__module__.startswith("gdrkit.") for need in marker.args):
            what_to_do = "add gdrkit = true to the settings of pytest, or --gdrkit"
            message = f"{item.nodeid} declares needs of gdrkit, but its pytest plugin is disabled. To do: {what_to_do}"
            raise pytest.UsageError(message)


def _is_enabled(config: pytest.Config) -> bool:
    return bool(config.getoption("gdrkit", default=False) or config.getini("gdrkit"))
