"""The state of a whole pytest run: facts, substrate, profile, seed.

Facts are collected at their first use, so that a run of cases without needs calls no API.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gdrkit
from gdrkit.errors import UsageError
from gdrkit.harness import leaks
from gdrkit.install_paths import install_paths
from gdrkit.inventory import Facts, Profile, choose_profile, load_profile, load_profiles, probe
from gdrkit.report.substrate import Substrate, substrates_of_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SESSION", "Session", "parse_substrate"]

_SEED_BITS = 63
_APIS = ("verbs", "cuda", "cufile")
# These APIs can also be named in ``--substrate``. A machine with such hardware is rare.
_NAMED = (*_APIS, "hlthunk")


class Session:
    """The state of a pytest run that the harness needs."""

    def __init__(self, config: pytest.Config, *, strict: bool = True) -> None:
        self._config = config
        self.strict = strict
        # Without ``--profile`` a user has not said which hardware must be there.
        self.fails_unforeseen = strict or config.getoption("gdrkit_profile", None) is not None
        self.records = _path(config, "records")
        self.plan = _path(config, "plan")
        self.cases = _path(config, "cases")
        self.wanted = parse_substrate(config.getoption("gdrkit_substrate", None))
        self.seed: int = config.getoption("gdrkit_seed", None)
        if self.seed is None:
            self.seed = int(os.environ.get("GDRKIT_TWINS_SEED", "0"), 0) or secrets.randbits(_SEED_BITS)
        given: str | None = config.getoption("gdrkit_command", None)
        self.command = install_paths().portable(given or " ".join(["pytest", *config.invocation_params.args]))
        self.version = gdrkit.__version__
        self._started: set[str] = set()

    @cached_property
    def facts(self) -> Facts:
        """The facts from the file of ``--facts``, else collected at the first use."""
        path = _path(self._config, "facts")
        return probe() if path is None else Facts.from_json(path.read_bytes())

    @cached_property
    def substrate(self) -> dict[str, Substrate]:
        """The substrate of each API, derived from the libraries in the facts."""
        return substrates_of_facts(self.facts)

    @cached_property
    def profile(self) -> Profile:
        """The profile of ``--profile`` if it describes this machine; without ``--profile``, the one that fits best.

        Raises
        ------
        UsageError
            No profile fits, or the named profile does not fit.
        """
        substrate = {api: found.value for api, found in self.substrate.items()}
        name = self._config.getoption("gdrkit_profile", None)
        if name is None:
            return choose_profile(load_profiles(), self.facts, substrate)
        profile = load_profile(name)
        misfits = profile.misfits(self.facts, substrate)
        if misfits:
            message = f"profile {name} does not describe this machine: " + "; ".join(misfits)
            raise UsageError(message, what_to_do="name another profile, or none")
        return profile

    @cached_property
    def commit(self) -> str | None:
        """Commit of the checkout."""
        return install_paths().commit()

    @cached_property
    def facts_digest(self) -> str:
        """Digest of the facts."""
        return self.facts.digest

    def check_substrate(self) -> None:
        """Check that each API runs on the substrate that ``--substrate`` demands.

        Raises
        ------
        UsageError
            An API runs on another substrate.
        """
        for api, wanted in sorted(self.wanted.items()):
            actual = self.substrate.get(api)
            # An API without facts is not another substrate: the needs of its cases are unmet, and their reasons say
            # why.
            if actual is not None and actual is not wanted:
                message = f"{api} was to run on {wanted.value} and runs on {actual.value}"
                start = f"gdrkit run --software -- {Path(sys.executable).name} -m {self.command}"
                advice = f"start it as: {start}" if wanted is Substrate.TWIN else "start it without gdrkit run"
                raise UsageError(message, what_to_do=advice)

    def start(self, apis: set[str]) -> None:
        """Do the one-time work of those of `apis` that this run has not used yet."""
        leaks.start_apis(apis - self._started)
        self._started |= apis

    def case_seed(self, case: str) -> int:
        """Return the seed of one case.

        It differs between cases and is the same in each run with the seed of this run.
        """
        digest = hashlib.sha256(f"{self.seed}:{case}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


# Key of the session in the stash of the configuration.
SESSION: pytest.StashKey[Session] = pytest.StashKey()


def parse_substrate(text: str | None) -> Mapping[str, Substrate]:
    """Parse ``software``, ``hardware`` or ``verbs=twin,cuda=hardware``. An empty text gives an empty mapping.

    Raises
    ------
    UsageError
        The text has another form.
    """
    if not text:
        return {}
    if text in ("software", "hardware"):
        wanted = Substrate.TWIN if text == "software" else Substrate.HARDWARE
        return dict.fromkeys(_NAMED if wanted is Substrate.TWIN else _APIS, wanted)
    parsed = {}
    known = {member.value: member for member in Substrate}
    for part in text.split(","):
        api, _, name = part.strip().partition("=")
        if api not in _NAMED or name not in known:
            message = f"no substrate {part!r}"
            raise UsageError(message, what_to_do="write software, hardware, or e.g. verbs=twin,cuda=hardware")
        parsed[api] = known[name]
    return parsed


def _path(config: pytest.Config, name: str) -> Path | None:
    value = config.getoption(f"gdrkit_{name}", None)
    return None if value is None else Path(value).absolute()
