"""What is true of a whole pytest run: facts, substrate, profile, seed.

Level 7. Facts are found when something first asks for them, so that a run of cases without needs asks no API.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import gdrkit
from gdrkit.errors import UsageError
from gdrkit.harness import leaks
from gdrkit.house import house
from gdrkit.inventory import Facts, Profile, choose_profile, load_profile, load_profiles, probe
from gdrkit.report.substrate import Substrate, of_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

__all__ = ["Session", "parse_substrate"]

_SEED_BITS = 63
_APIS = ("verbs", "cuda", "cufile")
# What else may be named; a machine with hardware of these seldom has it.
_NAMED = (*_APIS, "hlthunk")


class Session:
    """The run, as far as the harness is concerned."""

    def __init__(self, config: pytest.Config, *, strict: bool = True) -> None:
        self._config = config
        self.strict = strict
        # A user who named no profile has not said what must be there.
        self.fails_unforeseen = strict or config.getoption("gdrkit_profile", None) is not None
        self.records = _path(config, "records")
        self.plan = _path(config, "plan")
        self.cases = _path(config, "cases")
        self.wanted = parse_substrate(config.getoption("gdrkit_substrate", None))
        self.seed: int = config.getoption("gdrkit_seed", None)
        if self.seed is None:
            self.seed = int(os.environ.get("GDRKIT_TWINS_SEED", "0"), 0) or secrets.randbits(_SEED_BITS)
        given: str | None = config.getoption("gdrkit_command", None)
        self.command = house().portable(given or " ".join(["pytest", *config.invocation_params.args]))
        self.version = gdrkit.__version__
        self._started: set[str] = set()

    @cached_property
    def facts(self) -> Facts:
        """From the file of ``--facts``, else found now."""
        path = _path(self._config, "facts")
        return probe() if path is None else Facts.from_json(path.read_bytes())

    @cached_property
    def substrate(self) -> dict[str, Substrate]:
        """On what each API runs, judged by what the facts found loaded."""
        return of_facts(self.facts)

    @cached_property
    def profile(self) -> Profile:
        """The one that was named, if it describes this machine; else the one that describes it best.

        Raises
        ------
        UsageError
            There is none, or the one that was named does not fit.
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
        """Of the checkout."""
        return house().commit()

    @cached_property
    def facts_digest(self) -> str:
        """Of the facts."""
        return self.facts.digest

    def check_substrate(self) -> None:
        """See that each API runs on what ``--substrate`` wants.

        Raises
        ------
        UsageError
            One does not.
        """
        for api, wanted in sorted(self.wanted.items()):
            actual = self.substrate.get(api)
            # An API that does not answer is no other substrate: the needs of its cases are unmet, and say why.
            if actual is not None and actual is not wanted:
                message = f"{api} was to run on {wanted.value} and runs on {actual.value}"
                start = f"gdrkit run --software -- {Path(sys.executable).name} -m {self.command}"
                advice = f"start it as: {start}" if wanted is Substrate.TWIN else "start it without gdrkit run"
                raise UsageError(message, what_to_do=advice)

    def start(self, apis: set[str]) -> None:
        """Have those of `apis` that were not used yet in this run do what they do once."""
        leaks.start_apis(apis - self._started)
        self._started |= apis

    def case_seed(self, case: str) -> int:
        """The seed of one case: another for each, the same in each run with the seed of this one."""
        digest = hashlib.sha256(f"{self.seed}:{case}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


def parse_substrate(text: str | None) -> Mapping[str, Substrate]:
    """``software``, ``hardware`` or ``verbs=twin,cuda=hardware``; nothing is wanted when there is no text.

    Raises
    ------
    UsageError
        Another text.
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
