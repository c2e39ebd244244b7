"""Hooks and a fixture for all suites: each case has its own state folder for the measurements of NICs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.host import STATE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FOLDER_NUMBERS = iter(range(1 << 62))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the plugin of Hypothesis if no case has used Hypothesis. Its summary would import Hypothesis in 0.5 s."""
    plugin = session.config.pluginmanager.get_plugin("hypothesispytest")
    if plugin is not None and "hypothesis" not in sys.modules:
        session.config.pluginmanager.unregister(plugin)


@pytest.fixture(scope="session")
def state_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which each case has a state folder."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(autouse=True)
def state_folder(state_folders: Path) -> Iterator[Path]:
    """Set GDRKIT_STATE to the path of a folder that does not exist yet, for this process and its children."""
    folder = state_folders / str(next(_FOLDER_NUMBERS))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(STATE_VARIABLE, str(folder))
        yield folder
