"""Find the facts of this machine.

Level 4.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit import host, plain, witness
from gdrkit.errors import Reason
from gdrkit.inventory.facts import (
    SCHEMA_VERSION,
    ApiFailure,
    CudaFacts,
    Facts,
    LibraryFacts,
    PackageFacts,
    RouteFacts,
    VerbsFacts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["probe"]

_SONAMES = (
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libcufile.so.0",
    "libhl-thunk.so",
)
_PACKAGES = ("gdrkit", "gdrkit-twins", "pyverbs", "cuda-bindings", "kvikio")
_TIMEOUT_S = 60
_SHOWN_CHARACTERS = 400


def probe(
    tree: host.HostTree | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    ask_apis: bool = True,
    timeout_s: float = _TIMEOUT_S,
) -> Facts:
    """Read the host, and ask its APIs.

    Parameters
    ----------
    tree : HostTree or None
        The host's files; this host when None.
    environment : mapping or None
        With which the APIs are asked, so that the answer is that of a child started the same way; this process' own
        when None.
    ask_apis : bool
        Whether to start the children that ask CUDA, verbs and registration.
    timeout_s : float
        How long each may take; a driver that hangs becomes a failure with reason ``timeout``.
    """
    tree = host.HostTree() if tree is None else tree
    child = dict(os.environ if environment is None else environment)
    answers = _Answers()
    if ask_apis:
        answers = _ask_all(child, timeout_s)
    return Facts(
        schema_version=SCHEMA_VERSION,
        machine=os.uname().machine,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        kernel=host.kernel_facts(tree),
        gpus=host.nvidia_gpus(tree),
        nvidia_driver_version=host.nvidia_driver_version(tree),
        rdma_devices=host.rdma_devices(tree),
        libraries=tuple(_library(tree, soname, child.get("LD_LIBRARY_PATH", "")) for soname in _SONAMES),
        packages=tuple(PackageFacts(name=name, version=_version(name)) for name in _PACKAGES),
        limits=host.process_limits(tree),
        container=host.container_hints(tree),
        cuda=answers.cuda,
        cuda_failure=answers.cuda_failure,
        verbs=answers.verbs,
        verbs_failure=answers.verbs_failure,
        routes=answers.routes,
        routes_failure=answers.routes_failure,
        unreadable=tree.unreadable,
    )


@dataclass
class _Answers:
    cuda: CudaFacts | None = None
    cuda_failure: ApiFailure | None = None
    verbs: VerbsFacts | None = None
    verbs_failure: ApiFailure | None = None
    routes: tuple[RouteFacts, ...] = ()
    routes_failure: ApiFailure | None = None


def _ask_all(environment: Mapping[str, str], timeout_s: float) -> _Answers:
    # Both at once: each spends its time on imports and on waiting for a driver.
    asked = {api: _Question(api, environment) for api in ("verbs", "cuda")}
    verbs, verbs_failure = asked["verbs"].answer(timeout_s)
    cuda, cuda_failure = asked["cuda"].answer(timeout_s)
    found = _Answers(verbs_failure=verbs_failure, cuda_failure=cuda_failure)
    found.verbs = None if verbs is None else plain.from_plain(VerbsFacts, verbs)
    found.cuda = None if cuda is None else plain.from_plain(CudaFacts, cuda)
    if found.verbs and found.cuda and found.verbs.nics and found.cuda.devices:
        routes, found.routes_failure = _Question("registration", environment).answer(timeout_s)
        found.routes = () if routes is None else plain.from_plain(tuple[RouteFacts, ...], routes)
    return found


class _Question:
    """A child that asks one API."""

    def __init__(self, api: str, environment: Mapping[str, str]) -> None:
        self._api = api
        # A file and no pipe: it holds an answer of any length while nobody reads. What libraries print goes elsewhere.
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by answer().
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "gdrkit.inventory.ask", api, str(self._answer.fileno())],
                env=dict(environment),
                pass_fds=[self._answer.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except BaseException:
            self._answer.close()
            raise

    def answer(self, timeout_s: float) -> tuple[Any, ApiFailure | None]:
        """The facts as plain data, or the failure."""
        with self._answer as file:
            try:
                printed, _ = self._child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self._child.kill()
                printed, _ = self._child.communicate()
                return None, self._failure(Reason.TIMEOUT, f"no answer within {timeout_s:g} s", printed)
            file.seek(0)
            text = file.read()
        if not text:
            return None, self._failure(Reason.OTHER, _how_it_ended(self._child.returncode), printed)
        data = json.loads(text)
        if "failure" in data:
            return None, plain.from_plain(ApiFailure, data["failure"])
        return data["facts"], None

    def _failure(self, reason: Reason, message: str, printed: bytes) -> ApiFailure:
        last = printed.decode("utf-8", "backslashreplace").strip()[-_SHOWN_CHARACTERS:]
        return ApiFailure(
            api=self._api,
            operation="ask in a child process",
            status=self._child.returncode,
            status_name="",
            errno=None,
            reason=reason,
            message=f"{self._api}: {message}" + (f"; it printed: {last}" if last else ""),
            what_to_do=f"run it alone to see why: {sys.executable} -m gdrkit.inventory.ask {self._api} 1",
        )


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the child was ended by {signal.Signals(-code).name}"
    return f"the child ended with {code}"


def _library(tree: host.HostTree, soname: str, search_path: str) -> LibraryFacts:
    path = host.find_library(tree, soname, search_path=search_path.split(os.pathsep))
    if path is None:
        return LibraryFacts(soname=soname, path=None, build_id=None, error=None)
    described = witness.describe_library(str(tree.path(path)))
    return LibraryFacts(soname=soname, path=path, build_id=described.build_id, error=described.error)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
