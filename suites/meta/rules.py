"""The rules of the project that are checked automatically.

``nox -s meta`` checks them. Each rule has a reason, a small tree that violates the rule and one that follows it. The
cases use these trees to show that the check can fail. levels.py has the tables. checks.py and language.py have the
checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meta import checks, language

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["RULES", "Rule"]


@dataclass(frozen=True)
class Rule:
    """A rule, and the function that checks it.

    Attributes
    ----------
    name : str
        The requirement, as a clause.
    why : str
        The reason for the rule.
    find_violations : callable
        The check. It yields one line for each violation in the tree at the given path.
    violating_files, valid_files : Mapping of str to str
        A tree that violates the rule, and one that follows it: the text of each file by its path.
    """

    name: str
    why: str
    find_violations: Callable[[Path], Iterator[str]]
    violating_files: Mapping[str, str]
    valid_files: Mapping[str, str]

    def __str__(self) -> str:
        return self.name


RULES = (
    Rule(
        name="imports only go down the levels",
        why="A reader understands and tests a package with only the packages below it.",
        find_violations=checks.find_upward_imports,
        violating_files={"gdrkit/errors.py": "def late():\n    from gdrkit import cuda\n"},
        valid_files={"gdrkit/registration/__init__.py": "from gdrkit import verbs\nfrom gdrkit.cuda import device\n"},
    ),
    Rule(
        name="packages of one level do not import each other",
        why="For example, cuda exports a DmabufRange and verbs imports it; only registration imports both packages.",
        find_violations=checks.find_imports_within_level,
        violating_files={"gdrkit/verbs/region.py": "from gdrkit.cuda import memory\n"},
        valid_files={
            "gdrkit/verbs/region.py": "from gdrkit.verbs import nic\nfrom gdrkit.buffers import DmabufRange\n"
        },
    ),
    Rule(
        name="modules of one package do not import each other in a circle",
        why="A module can be read and changed with only the modules below it.",
        find_violations=checks.find_import_circles,
        violating_files={
            "gdrkit/verbs/nic.py": "def region(self):\n    from gdrkit.verbs.region import Region\n",
            "gdrkit/verbs/region.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from gdrkit.verbs.context import Context\n",
            "gdrkit/verbs/context.py": "from gdrkit.verbs import nic\n",
        },
        valid_files={
            "gdrkit/verbs/__init__.py": "from gdrkit.verbs.nic import Nic\n",
            "gdrkit/verbs/nic.py": "from gdrkit.verbs.region import Region\n",
            "gdrkit/verbs/region.py": "import importlib\nimportlib.import_module('gdrkit.verbs._initiator')\n",
        },
    ),
    Rule(
        name="every package has a level",
        why="A package without a level could import any other.",
        find_violations=checks.find_packages_without_level,
        violating_files={"gdrkit/unlisted.py": ""},
        valid_files={"gdrkit/units.py": ""},
    ),
    Rule(
        name="a foreign library is imported only by its seam",
        why="The seam is the one file that wraps the library. Only this file depends on its version, types and errors.",
        find_violations=checks.find_imports_outside_seams,
        violating_files={"gdrkit/inventory/probe.py": "import importlib\nimportlib.import_module('pyverbs.device')\n"},
        valid_files={"gdrkit/verbs/_pyverbs.py": "import ctypes\nimport pyverbs.device\n"},
    ),
    Rule(
        name="gdrkit has no code for stand-ins (mocks, fakes, stubs)",
        why="Twins and hardware use one code path. With a branch for twins, the cases would test only that branch.",
        find_violations=checks.find_stand_in_words,
        violating_files={"gdrkit/verbs/nic.py": "is_simulated = False\n"},
        valid_files={checks.SUBSTRATE_FILE: "WORD = 'simulated'\n", "gdrkit/verbs/nic.py": "name = 'mlx5_0'\n"},
    ),
    Rule(
        name="no case replaces functions",
        why="A case that replaces a function of the real API tests the replacement, not the API.",
        find_violations=checks.find_replaced_functions,
        violating_files={"suites/rdma/test_a.py": "def test(monkeypatch):\n    monkeypatch.setattr('a.b', 1)\n"},
        valid_files={
            "suites/rdma/test_a.py": "def test(monkeypatch):\n    monkeypatch.setenv('A', 'b')\n",
            "suites/meta/defects/test_b.py": "from unittest import mock\n",
        },
    ),
    Rule(
        name="only the harness skips cases",
        why="A case declares its needs with @needs above its body, and the harness reports each unmet need. A skip in "
        "the body hides the reason.",
        find_violations=checks.find_skips_outside_harness,
        violating_files={
            "suites/rdma/test_a.py": "import pytest\n@pytest.mark.skipif(True, reason='')\ndef test(): ...\n"
        },
        valid_files={"gdrkit/harness/plugin.py": "import pytest\ndef run():\n    pytest.skip('reason')\n"},
    ),
    Rule(
        name="no failure is swallowed",
        why="Code that catches every exception also catches unexpected ones, and reports success.",
        find_violations=checks.find_swallowed_errors,
        violating_files={"gdrkit/units.py": "try:\n    f()\nexcept Exception:\n    pass\n"},
        valid_files={"gdrkit/units.py": "try:\n    f()\nexcept Exception as error:\n    raise ValueError from error\n"},
    ),
    Rule(
        name="no finalizer takes a lock",
        why="The garbage collector can run a finalizer at any allocation, also in the thread that holds the lock.",
        find_violations=checks.find_locking_finalizers,
        violating_files={
            "gdrkit/handles.py": "class Handle:\n    def release(self):\n        with _lock:\n            pass\n",
            "gdrkit/buffers.py": "from gdrkit.handles import Handle\nclass Range:\n    def close(self):\n"
            "        self.handle.release()\n    def __del__(self):\n        self.close()\n",
        },
        valid_files={
            "gdrkit/handles.py": "class Handle:\n    def release(self):\n        _open_kinds.pop(self.id, None)\n"
            "    def __del__(self):\n        self.release()\n    def other(self):\n        with _lock:\n"
            "            pass\n",
        },
    ),
    Rule(
        name="only one module receives descriptors",
        why="Without MSG_CMSG_CLOEXEC, child programs inherit the descriptors. Without a check of MSG_CTRUNC, a "
        "truncated message is accepted.",
        find_violations=checks.find_descriptor_receivers,
        violating_files={"gdrkit/storage/connection.py": "import socket\nsocket.recv_fds(end, 4096, 4)\n"},
        valid_files={checks.RECEIVER_FILE: "connection.recvmsg(1, 1, 1)\n"},
    ),
    Rule(
        name="no case sleeps",
        why="A sleep is too short on a slow machine and too long on all others. A case waits for an event.",
        find_violations=checks.find_sleeping_cases,
        violating_files={"suites/rdma/test_a.py": "from time import sleep\nsleep(1)\n"},
        valid_files={"suites/rdma/test_a.py": "import time\ntime.monotonic()\n"},
    ),
    Rule(
        name="a module has a docstring and an __all__",
        why="A newcomer reads the docstring first. A name that is not in __all__ may change.",
        find_violations=checks.find_missing_docstrings_and_dunder_all,
        violating_files={"gdrkit/units.py": "'''Sizes.'''\nKIB = 1024\n"},
        valid_files={"gdrkit/units.py": "'''Sizes.'''\n__all__ = ['KIB']\nKIB = 1024\n"},
    ),
    Rule(
        name="the sources contain no notes about unfinished work",
        why="Missing work is described in an issue, where the maintainers see it.",
        find_violations=checks.find_unfinished_work,
        violating_files={"native/a.cpp": "// FIX" + "ME later\n"},
        valid_files={"native/a.cpp": "// The kernel fixes the address.\n"},
    ),
    Rule(
        name="no record and no page contains a path of the machine that made it",
        why="A library is identified by its name, its build id and its path in an environment. A full path is of no "
        "use to readers, and may reveal who made the record.",
        find_violations=checks.find_machine_paths,
        violating_files={"reports/baselines/bare/a.jsonl": '{"path": "/home/me/lib/libcuda.so.1"}\n'},
        valid_files={"reports/baselines/bare/a.jsonl": '{"path": "{python}/opt/a.so", "soname": "/usr/lib/a.so"}\n'},
    ),
    Rule(
        name="every top-level folder has a README",
        why="A newcomer reads there what the folder contains.",
        find_violations=checks.find_missing_readmes,
        violating_files={"extra/old.py": ""},
        valid_files={"docs/README.md": "# docs\n", ".git/config": "", "build/a": ""},
    ),
    Rule(
        name="replaced words are not used again",
        why="Readers search for the terms of rdma-core, CUDA and the manuals, and half of the readers are not native "
        "speakers.",
        find_violations=language.find_gone_words,
        violating_files={"automation/a.py": "# The hou" + "se is cleaned.\n"},
        valid_files={"automation/a.py": "# The project is checked by the CI; there is room for two more.\n"},
    ),
    Rule(
        name="comments and docstrings have a subject and a verb",
        why="A clause that begins with who, what or of has to be read twice.",
        find_violations=language.find_headless_openings,
        violating_files={"automation/a.py": "# What is leased when the cache closes.\n"},
        valid_files={
            "automation/a.py": "# A lease that is held, and\n# what it covers, stays.\n# Why? See cache.py.\n"
        },
    ),
    Rule(
        name="a comment repeats a noun instead of a pronoun",
        why="The reader of a pronoun such as 'those' has to search for its noun.",
        find_violations=language.find_chained_pronouns,
        violating_files={"automation/a.py": "# The errors are those " + "of the driver.\n"},
        valid_files={
            "automation/a.py": "# The driver's errors are raised. Those in the log remain.\n",
            "docs/a.md": "",
        },
    ),
    Rule(
        name="the name of a case has at most 60 characters",
        why="Reports and terminals show the names in one line.",
        find_violations=language.find_long_test_names,
        violating_files={"automation/test_a.py": f"def test_{'x' * 60}():\n"},
        valid_files={"automation/test_a.py": f"def test_{'x' * 55}():\n"},
    ),
)
