"""The needs of a case, declared before its body::

    from gdrkit.harness.needs import cuda, needs, verbs

    @needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
    def test_a_remote_write_lands(device, nic, peer): ...

A need is a frozen object that checks facts. The reason is a sentence that the need makes from the facts, so that no
case writes one. All needs of a case are checked, and every unmet need is reported.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, cufile, gaudi, host, verbs
from gdrkit.harness.needs.base import Need, software

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MARK", "Need", "apis", "cuda", "cufile", "declared", "gaudi", "host", "needs", "software", "verbs"]

MARK = "needs"
# Needs are named after the API; those listed here are named after the hardware that the API controls.
_API_OF = {"gaudi": Api.HLTHUNK.value}


def needs(*wanted: Need) -> pytest.MarkDecorator:
    """Declare the needs of a case, a class of cases or (as ``pytestmark``) a file."""
    for need in wanted:
        if not isinstance(need, Need):
            message = f"{need!r} is no need; needs that take a number are called, e.g. verbs.nic(count_min=2)"
            raise TypeError(message)
    return pytest.mark.needs(*wanted)


def declared(item: pytest.Item) -> tuple[Need, ...]:
    """Return the needs of a case, those of its file first, each once."""
    return tuple(dict.fromkeys(_declared(item)))


def _declared(item: pytest.Item) -> Iterator[Need]:
    for mark in reversed(list(item.iter_markers(MARK))):
        yield from mark.args


def apis(need: Need) -> frozenset[str]:
    """Return the possible APIs in a need's name: ``cuda`` of ``cuda.vmm``, ``verbs`` of ``software(verbs)``."""
    return frozenset(_API_OF.get(word, word) for word in re.split(r"\W", need.name)[:2])
