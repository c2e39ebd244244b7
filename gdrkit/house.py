"""Where the suites, profiles, templates and schemas lie.

Level 0. In a checkout they stand next to the package; a wheel carries them as package data. Nothing else in gdrkit asks
where it was installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["House", "house"]

_GIT_TIMEOUT_S = 10
# Whose folders have the same names on other machines.
_SYSTEM = re.compile(r"/(usr|lib\w*)(/|$)")


@dataclass(frozen=True, slots=True)
class House:
    """The folders that belong to gdrkit but are not Python packages.

    Attributes
    ----------
    root : Path
        The folder that holds ``suites``, ``hardware`` and ``reports``.
    is_checkout : bool
        Whether that is a source tree, and not the data of an installed wheel.
    """

    root: Path
    is_checkout: bool

    @property
    def suites(self) -> Path:
        """The pytest suites."""
        return self.root / "suites"

    @property
    def profiles(self) -> Path:
        """The profiles of machines, one TOML file each."""
        return self.root / "hardware" / "profiles"

    @property
    def templates(self) -> Path:
        """The templates of reports."""
        return self.root / "reports" / "templates"

    @property
    def schemas(self) -> Path:
        """The JSON schemas of records."""
        return self.root / "reports" / "schema"

    @property
    def runs(self) -> Path:
        """Where a run writes its report unless told otherwise."""
        return self.root / "reports" / "runs" if self.is_checkout else Path.cwd() / "gdrkit-report"

    def portable(self, text: str) -> str:
        """`text` without places that mean nothing on another machine, each by what it is there.

        Nothing stands for this checkout, ``{python}`` for the environment of this Python, ``{site}`` for any other
        folder that Python imports from, ``{library_path}`` for one of LD_LIBRARY_PATH, ``{home}`` for the user's. What
        belongs to the system stays as it is.
        """
        named = {str(self.root): ""} if self.is_checkout else {}
        named.setdefault(sys.prefix, "{python}/")
        for name, folders in {
            "{library_path}/": os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep),
            "{site}/": sys.path,
            "{home}/": [os.path.expanduser("~")],  # noqa: PTH111 - Path raises where there is none.
        }.items():
            for folder in folders:
                named.setdefault(folder.rstrip("/"), name)
        own = {folder: name for folder, name in named.items() if folder.startswith("/") and not _SYSTEM.match(folder)}
        # Where one lies in another, as the twins in the environment, the one that is about the machine goes first.
        for folder, name in own.items():
            text = text.replace(f"{folder}/", name)
        return text

    def commit(self) -> str | None:
        """The commit of the checkout, with ``-dirty`` when tracked files were changed; None when nobody can tell.

        GDRKIT_COMMIT says it for a copy of a checkout that travelled without its history.
        """
        if stated := os.environ.get("GDRKIT_COMMIT"):
            return stated
        if not self.is_checkout or not (self.root / ".git").exists():
            return None
        head = _git(self.root, "rev-parse", "--verify", "--quiet", "HEAD")
        if not head:
            return None
        return f"{head}-dirty" if _git(self.root, "status", "--porcelain", "--untracked-files=no") else head


@cache
def house() -> House:
    """Find the house of this very installation."""
    package = Path(__file__).resolve().parent
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "suites").is_dir():
        return House(root=checkout, is_checkout=True)
    return House(root=package / "_house", is_checkout=False)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        # Without git the commit is unknown, which is what the caller is told.
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
