"""The needs of a case, declared before its body::

    from gdrkit.harness.needs import cuda, needs, verbs

    @needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
    def test_remote_write_arrives(device, nic, peer): ...

A need is a frozen object. Its method ``check`` examines the facts about the machine, and returns the reason if the need
is not met. All needs of a case are checked, and every unmet need is reported.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, gaudi, host, verbs
from gdrkit.harness.needs.base import Need, software, without_twin

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "MARK",
    "Need",
    "cuda",
    "cufile",
    "declared",
    "gaudi",
    "host",
    "needs",
    "possible_apis",
    "software",
    "verbs",
    "without_twin",
]

# The name of the pytest mark that :func:`needs` sets.
MARK = "needs"
# The first word of the name of a need (``cuda`` in ``cuda.vmm``) is the name of its API, except for these words.
_API_BY_PREFIX = {"gaudi": Api.HLTHUNK.value}


def needs(*required: Need) -> pytest.MarkDecorator:
    """Declare the needs of a case, a class of cases or (as ``pytestmark``) a module."""
    for need in required:
        if not isinstance(need, Need):
            message = f"{need!r} is not a need; a need with parameters must be called, e.g. verbs.nic(count_min=2)"
            raise TypeError(message)
    return pytest.mark.needs(*required)


def declared(item: pytest.Item) -> tuple[Need, ...]:
    """Return the needs of a case without duplicates. The needs of its module are first."""
    return tuple(dict.fromkeys(_iterate_declared_needs(item)))


def _iterate_declared_needs(item: pytest.Item) -> Iterator[Need]:
    for mark in reversed(list(item.iter_markers(MARK))):
        yield from mark.args


def possible_apis(need: Need) -> frozenset[str]:
    """Return the first two words in the name of a need. At most one of them is the name of an API.

    The words are ``cuda`` and ``vmm`` for ``cuda.vmm``, and ``software`` and ``verbs`` for ``software(verbs)``. The
    caller must ignore the other words.
    """
    return frozenset(_API_BY_PREFIX.get(word, word) for word in re.split(r"\W", need.name)[:2])
