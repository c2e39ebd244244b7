"""The objects that all cases of a pytest run share: the options, the facts about the machine, its profile, the seed.

The facts are collected when they are first used, so that a run of cases without needs opens no device.
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

__all__ = ["SESSION_KEY", "Session", "parse_substrates"]

_SEED_BITS = 63
_COMMON_APIS = ("verbs", "cuda", "cufile")
# The APIs that ``--substrate`` can name. The APIs of rare devices are not part of ``--substrate=hardware``.
_NAMED_APIS = (*_COMMON_APIS, "hlthunk")


class Session:
    """The options of a pytest run, and the facts about the machine.

    Attributes
    ----------
    strict : bool
        Whether the harness handles every case of the run, not only the cases that use the harness.
    fails_unforeseen : bool
        Whether the run fails if a case has an unmet need that the profile does not foresee.
    records_path, plan_path, cases_path : Path or None
        The files of ``--records``, ``--plan`` and ``--cases``.
    required_substrates : mapping
        The substrates that ``--substrate`` requires, by API.
    seed : int
        The seed of the run: ``--seed``, else the environment variable GDRKIT_TWINS_SEED if it is set and not 0, else a
        random number.
    command : str
        The command line that the records contain.
    version : str
        The version of gdrkit.
    """

    def __init__(self, config: pytest.Config, *, strict: bool = True) -> None:
        self._config = config
        self.strict = strict
        # In another project without --gdrkit-profile, nothing says which hardware to expect. So an unmet need does not
        # fail the run.
        self.fails_unforeseen = strict or config.getoption("gdrkit_profile", None) is not None
        self.records_path = _parse_path(config, "records")
        self.plan_path = _parse_path(config, "plan")
        self.cases_path = _parse_path(config, "cases")
        self.required_substrates = parse_substrates(config.getoption("gdrkit_substrate", None))
        self.seed: int = config.getoption("gdrkit_seed", None)
        if self.seed is None:
            self.seed = int(os.environ.get("GDRKIT_TWINS_SEED", "0"), 0) or secrets.randbits(_SEED_BITS)
        command: str | None = config.getoption("gdrkit_command", None)
        self.command = install_paths().portable(command or " ".join(["pytest", *config.invocation_params.args]))
        self.version = gdrkit.__version__
        self._started_apis: set[str] = set()

    @cached_property
    def facts(self) -> Facts:
        """The facts in the file of ``--facts``, or the facts about this machine without that option."""
        path = _parse_path(self._config, "facts")
        return probe() if path is None else Facts.from_json(path.read_bytes())

    @cached_property
    def substrates(self) -> dict[str, Substrate]:
        """The substrate of each API, derived from the libraries in the facts."""
        return substrates_of_facts(self.facts)

    @cached_property
    def profile(self) -> Profile:
        """The profile of ``--profile``, or without that option the profile that fits this machine best.

        Raises
        ------
        UsageError
            No profile fits, or the named profile does not fit.
        """
        substrates = {api: substrate.value for api, substrate in self.substrates.items()}
        profile_name = self._config.getoption("gdrkit_profile", None)
        if profile_name is None:
            return choose_profile(load_profiles(), self.facts, substrates)
        profile = load_profile(profile_name)
        misfits = profile.misfits(self.facts, substrates)
        if misfits:
            message = f"profile {profile_name} does not describe this machine: " + "; ".join(misfits)
            raise UsageError(message, what_to_do="select another profile, or omit --profile")
        return profile

    @cached_property
    def commit(self) -> str | None:
        """Commit of the checkout, or None if it is unknown."""
        return install_paths().commit()

    @cached_property
    def facts_digest(self) -> str:
        """Digest of the facts."""
        return self.facts.digest

    def check_substrate(self) -> None:
        """Check that each API runs on the substrate that ``--substrate`` requires.

        Raises
        ------
        UsageError
            An API runs on another substrate.
        """
        for api, required_substrate in sorted(self.required_substrates.items()):
            actual_substrate = self.substrates.get(api)
            # An API without facts has no substrate. The cases that need it do not run, and their records say why.
            if actual_substrate is not None and actual_substrate is not required_substrate:
                message = f"{api} must run on {required_substrate.value}, but runs on {actual_substrate.value}"
                twin_command = f"gdrkit run --software -- {Path(sys.executable).name} -m {self.command}"
                advice = (
                    f"start it by: {twin_command}"
                    if required_substrate is Substrate.TWIN
                    else "start it without gdrkit run"
                )
                raise UsageError(message, what_to_do=advice)

    def start_apis(self, apis: set[str]) -> None:
        """Call :func:`gdrkit.harness.leaks.start_apis` for the APIs that this run has not started yet."""
        leaks.start_apis(apis - self._started_apis)
        self._started_apis |= apis

    def case_seed(self, case_id: str) -> int:
        """Return the seed of a case. It depends only on the seed of the run and on the id of the case."""
        digest = hashlib.sha256(f"{self.seed}:{case_id}".encode()).digest()
        return int.from_bytes(digest[:8], "little")


# Key of the session in the stash of the pytest configuration.
SESSION_KEY: pytest.StashKey[Session] = pytest.StashKey()


def parse_substrates(text: str | None) -> Mapping[str, Substrate]:
    """Return the substrate of each API in a text: ``software``, ``hardware``, or e.g. ``verbs=twin,cuda=hardware``.

    The result is empty if there is no text.

    Raises
    ------
    UsageError
        The text has another form.
    """
    if not text:
        return {}
    if text in ("software", "hardware"):
        substrate = Substrate.TWIN if text == "software" else Substrate.HARDWARE
        return dict.fromkeys(_NAMED_APIS if substrate is Substrate.TWIN else _COMMON_APIS, substrate)
    substrates = {}
    substrate_by_name = {member.value: member for member in Substrate}
    for assignment in text.split(","):
        api, _, name = assignment.strip().partition("=")
        if api not in _NAMED_APIS or name not in substrate_by_name:
            message = f"{assignment!r} is not a substrate"
            raise UsageError(message, what_to_do="write software, hardware, or e.g. verbs=twin,cuda=hardware")
        substrates[api] = substrate_by_name[name]
    return substrates


def _parse_path(config: pytest.Config, option_name: str) -> Path | None:
    path_text = config.getoption(f"gdrkit_{option_name}", None)
    return None if path_text is None else Path(path_text).absolute()
