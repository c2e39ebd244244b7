"""The project rules that a program can check, and the tables that they use.

A rule examines a source tree and yields one line for each violation. Every rule has its reason, and a small tree that
must violate it, because a rule that detects nothing is worse than none. Sources are parsed and never imported.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meta import language

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["CARRY_ON", "LEVELS", "RULES", "SAME_LEVEL", "SEAMS", "SIBLINGS_LEVEL", "Rule", "crossings"]

# These are the packages of gdrkit/ by level. Imports only go down.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"__init__", "errors", "exit_code", "house", "text", "units", "verdict"}),
    frozenset({"buffers", "children", "faultplan", "forks", "handles", "loader", "pattern", "plain", "scm_rights"}),
    frozenset({"cuda", "cufile", "gaudi", "host", "verbs"}),
    frozenset({"launch", "registration", "witness"}),
    frozenset({"gds", "inventory", "storage"}),
    frozenset({"report", "usrbio"}),
    frozenset({"qualify"}),
    frozenset({"__main__", "cli", "cli_files", "cli_inventory", "cli_report", "cli_tiers", "harness"}),
)

# These pairs may import a package of their own level. Packages of level 2 are never listed: they are the real APIs and
# do not know each other.
SAME_LEVEL: frozenset[tuple[str, str]] = frozenset(
    {
        ("__main__", "cli"),
        ("buffers", "handles"),
        ("cli", "cli_files"),
        ("cli", "cli_inventory"),
        ("cli", "cli_report"),
        ("cli", "cli_tiers"),
        ("exit_code", "errors"),
    }
)

SIBLINGS_LEVEL = 2

# These files may name a foreign module, or a native module of the project, which has no types either. ctypes can open
# any library, so only seams may use it.
SEAMS: Mapping[str, frozenset[str]] = {
    "pyverbs": frozenset({"gdrkit/verbs/_pyverbs.py"}),
    # This entry precedes that of the package that contains the module, because the first matching name decides.
    "cuda.bindings.cufile": frozenset({"gdrkit/cufile/_cufile.py"}),
    "cuda": frozenset({"gdrkit/cuda/_driver.py"}),
    "kvikio": frozenset({"gdrkit/cufile/_kvikio.py"}),
    "mpi4py": frozenset({"gdrkit/qualify/ranks/_mpi.py"}),
    "mfusepy": frozenset({"gdrkit/usrbio/_mfusepy.py"}),
    "gdrkit.usrbio._hf3fs": frozenset({"gdrkit/usrbio/_library.py"}),
    "gdrkit.usrbio._loop": frozenset({"gdrkit/usrbio/_agent_loop.py"}),
    "gdrkit.verbs._initiator": frozenset({"gdrkit/verbs/_native.py"}),
    "sqlite3": frozenset({"gdrkit/gds/tiers/_sqlite.py"}),
    "gdrkit.storage._engine": frozenset({"gdrkit/storage/_native.py"}),
    "gdrkit.gds._engine": frozenset({"gdrkit/gds/_native.py"}),
    "ctypes": frozenset(
        {
            "gdrkit/cuda/_dlpack.py",
            "gdrkit/cuda/_driver.py",
            "gdrkit/cufile/_cufile.py",
            "gdrkit/gaudi/_hlthunk.py",
            "gdrkit/host/_libc.py",
            "gdrkit/host/_nvml.py",
            "gdrkit/usrbio/_mfusepy.py",
            "gdrkit/verbs/_layout.py",
            "gdrkit/verbs/_pyverbs.py",
        }
    ),
}

# These files catch every exception so that all actions of a list run, and raise or pass on what they caught.
CARRY_ON: frozenset[str] = frozenset({"gdrkit/handles.py"})

_IMPORTERS = {"__import__", "find_spec", "import_module", "import_native"}

# A reader would search for stand-ins by these words. Only report/substrate.py may say what was a stand-in.
_STAND_IN_WORDS = re.compile(r"(?<![a-z])(mock|fake|stub|simulat)\w*", re.IGNORECASE)
_SUBSTRATE = "gdrkit/report/substrate.py"
_RECEIVER = "gdrkit/scm_rights.py"

_SOURCES = (".py", ".cpp", ".hpp", ".h", ".md", ".toml", ".ini", ".sh", ".txt", ".yaml", ".yml", ".cmake", ".html")
# The words are split, so that this file does not violate the rule.
_UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


# Paths below these folders exist only on one machine, or for one user.
_MACHINE_PLACES = re.compile(r"(?<![\w}./-])/(?:work|opt|home|root|Users)/[^\s\"'<&]*")


@dataclass(frozen=True)
class Rule:
    """A rule: its name, its reason, its check of a tree, a tree that violates it and one that does not."""

    name: str
    why: str
    breaches: Callable[[Path], Iterator[str]]
    must_fail: Mapping[str, str]
    must_pass: Mapping[str, str]

    def __str__(self) -> str:
        return self.name


def _modules(root: Path, *places: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield path and syntax tree of every Python file in these files and folders."""
    for place in places:
        start = root / place
        for path in sorted(start.rglob("*.py")) if start.is_dir() else [start]:
            if path.is_file():
                yield path.relative_to(root).as_posix(), ast.parse(path.read_text(), filename=str(path))


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of every import of a module, at any position and also by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in _IMPORTERS and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value
            elif isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
                yield node.lineno, str(first.values[0].value)


def _called(node: ast.Call) -> str:
    """Return the last name of the called function: ``sleep`` for ``time.sleep(1)``."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression, e.g. ``pytest.mark.skipif``; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _room(path: str) -> str:
    """Return ``cuda`` for gdrkit/cuda/device.py, ``errors`` for gdrkit/errors.py."""
    return path.split("/")[1].removesuffix(".py")


def _level(room: str) -> int | None:
    return next((level for level, rooms in enumerate(LEVELS) if room in rooms), None)


def crossings(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield place, importing package and imported package of every import between two packages."""
    for path, tree in _modules(root, "gdrkit"):
        for line, name in _imports(tree):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package == "gdrkit" and other and other not in {_room(path), "__version__"}:
                yield f"{path}:{line}", _room(path), other


def _rooms(root: Path) -> Iterator[str]:
    for path, _ in _modules(root, "gdrkit"):
        if _level(_room(path)) is None:
            yield f"{path}: {_room(path)} has no level; give it one in suites/meta/rules.py"


def _levels(root: Path) -> Iterator[str]:
    for place, room, other in crossings(root):
        above, below = _level(room), _level(other)
        if above is None or below is None or below > above:
            yield f"{place} (level {above}) imports gdrkit.{other} (level {below})"


def _neighbours(root: Path) -> Iterator[str]:
    for place, room, other in crossings(root):
        if _level(room) == _level(other) and (room, other) not in SAME_LEVEL:
            yield f"{place} imports gdrkit.{other}, a room of its own level {_level(room)}"


def _seams(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "gdrkit"):
        for line, name in _imports(tree):
            allowed = next((files for module, files in SEAMS.items() if f"{name}.".startswith(f"{module}.")), None)
            if allowed is not None and path not in allowed:
                yield f"{path}:{line} names {name}; only {', '.join(sorted(allowed))} may"


def _stand_ins(root: Path) -> Iterator[str]:
    for path in sorted((root / "gdrkit").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        if where != _SUBSTRATE:
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                yield from (f"{where}:{number} says {found[0]}" for found in _STAND_IN_WORDS.finditer(line))


def _replacing(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "suites", "gdrkit"):
        if path.startswith("suites/meta/defects/"):
            continue
        for line, name in _imports(tree):
            if name.startswith(("unittest.mock", "mock.", "pytest_mock")) or name == "mock":
                yield f"{path}:{line} imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _dotted(node.func).endswith(("monkeypatch.setattr", "mocker.patch")):
                yield f"{path}:{node.lineno} calls {_dotted(node.func)}"


def _skips(root: Path) -> Iterator[str]:
    banned = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"}
    for path, tree in _modules(root, "suites", "gdrkit"):
        if path.startswith("gdrkit/harness/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _dotted(node) in banned:
                yield f"{path}:{node.lineno} has {_dotted(node)}"
        for line, name in _imports(tree):
            if name in {"pytest.skip", "pytest.importorskip", "unittest.skip", "unittest.skipIf"}:
                yield f"{path}:{line} imports {name}"


def _leaves(node: ast.AST) -> bool:
    """Return whether the node passes a failure on: by an exception, or by the end of the process."""
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _dotted(node.func) == "os._exit")


def _swallowed(root: Path) -> Iterator[str]:
    everything = {"Exception", "BaseException"}
    for path, tree in _modules(root, "gdrkit", "suites", "native", "automation", "noxfile.py"):
        for node in ast.walk(tree) if path not in CARRY_ON else ():
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                wide = any(kind is None or _dotted(kind) in everything for kind in kinds)
                if wide and not any(map(_leaves, ast.walk(node))):
                    yield f"{path}:{node.lineno} catches everything and raises nothing"
            elif isinstance(node, ast.Call) and _called(node) == "suppress":
                yield from (f"{path}:{node.lineno} suppresses {it}" for it in everything & set(map(_dotted, node.args)))


_LOCKING = {"acquire", "join", "wait", "wait_for"}


def _functions(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Return every function and method of a module by its name. A class is represented by its constructor."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            found.setdefault(node.name, []).extend(made)
    return found


def _finalizers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions that the garbage collector calls: ``__del__``, and callbacks of weak references."""
    callbacks = {"finalize": 1, "proxy": 1, "ref": 1}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node.name
        elif isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[0] in {"", "weakref"}:
            place = callbacks.get(_called(node))
            if place is not None and len(node.args) > place:
                yield _dotted(node.args[place]).rpartition(".")[2]


def _locks(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        names = [_dotted(item.context_expr).rpartition(".")[2] for item in node.items]
        return any(re.search(r"lock|condition|_changed", name, re.IGNORECASE) for name in names)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOCKING


def _callable_from(tree: ast.Module, trees: Mapping[str, ast.Module]) -> dict[str, list[ast.AST]]:
    """Return the functions of a module, and of the modules of gdrkit that it imports."""
    known = _functions(tree)
    for _line, name in _imports(tree):
        parts = name.split(".")
        paths = ("/".join(parts[:end]) + ".py" for end in range(2, len(parts) + 1))
        for other in (trees[path] for path in paths if path in trees):
            for function, nodes in _functions(other).items():
                known.setdefault(function, []).extend(nodes)
    return known


def _locked_finalizers(root: Path) -> Iterator[str]:
    """Yield finalizers that can wait for a lock. Calls are followed by name alone, so a false alarm is possible."""
    trees = dict(_modules(root, "gdrkit"))
    for path, tree in trees.items():
        known, waiting, seen = _callable_from(tree, trees), list(_finalizers(tree)), set[str]()
        while waiting:
            name = waiting.pop()
            nodes = () if name in seen else [node for each in known.get(name, ()) for node in ast.walk(each)]
            seen.add(name)
            waiting += (_called(node) for node in nodes if isinstance(node, ast.Call))
            yield from (f"{path}: a finalizer reaches {name}(), which waits for a lock" for _ in filter(_locks, nodes))


def _receiving(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "gdrkit"):
        for node in ast.walk(tree) if path != _RECEIVER else ():
            if isinstance(node, ast.Call) and _called(node) in {"recv_fds", "recvmsg", "recvmsg_into"}:
                yield f"{path}:{node.lineno} calls {_called(node)}"


def _sleeps(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "suites"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) == "sleep":
                yield f"{path}:{node.lineno} sleeps"


def _introduced(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "gdrkit", "suites", "native", "automation", "noxfile.py"):
        if not ast.get_docstring(tree):
            yield f"{path} has no docstring"
        product = path.startswith(("gdrkit/", "native/")) and "/tests/" not in path
        if product and not any(
            isinstance(target, ast.Name) and target.id == "__all__"
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ):
            yield f"{path} has no __all__"


def _unfinished(root: Path) -> Iterator[str]:
    generated = {"build", "reports/runs"}
    for path in sorted(root.rglob("*")):
        where = path.relative_to(root).as_posix()
        if path.suffix not in _SOURCES or where.startswith(".") or any(where.startswith(f"{it}/") for it in generated):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            yield from (f"{where}:{number} has {found[0]}" for found in _UNFINISHED.finditer(line))


def _places(root: Path) -> Iterator[str]:
    """Yield machine-specific paths in records and in the pages that are made of them."""
    made = [*(root / "reports" / "baselines").rglob("*"), *(root / "docs").rglob("*.html")]
    for path in sorted(path for path in made if path.is_file()):
        found = dict.fromkeys(_MACHINE_PLACES.findall(path.read_text()))
        yield from (f"{path.relative_to(root)} names {place}" for place in found)


def _readmes(root: Path) -> Iterator[str]:
    made = {"__pycache__", "build", "dist"}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if folder.name not in made and not (folder / "README.md").is_file():
            yield f"{folder.name}/ has no README.md"


RULES = (
    Rule(
        name="imports only go down the levels",
        why="A room can be understood, and tested, with nothing but the rooms below it.",
        breaches=_levels,
        must_fail={"gdrkit/errors.py": "def late():\n    from gdrkit import cuda\n"},
        must_pass={"gdrkit/registration/__init__.py": "from gdrkit import verbs\nfrom gdrkit.cuda import device\n"},
    ),
    Rule(
        name="rooms of one level do not know each other",
        why="CUDA exports a DmabufRange and verbs imports one; only registration knows both.",
        breaches=_neighbours,
        must_fail={"gdrkit/verbs/region.py": "from gdrkit.cuda import memory\n"},
        must_pass={"gdrkit/verbs/region.py": "from gdrkit.verbs import nic\nfrom gdrkit.buffers import DmabufRange\n"},
    ),
    Rule(
        name="every room has a level",
        why="A room outside the table would be outside the rule.",
        breaches=_rooms,
        must_fail={"gdrkit/attic.py": ""},
        must_pass={"gdrkit/units.py": ""},
    ),
    Rule(
        name="a foreign library is named in its seam alone",
        why="Versions differ in that one file, and nothing of the library's types or errors leaks out of it.",
        breaches=_seams,
        must_fail={"gdrkit/inventory/probe.py": "import importlib\nimportlib.import_module('pyverbs.device')\n"},
        must_pass={"gdrkit/verbs/_pyverbs.py": "import ctypes\nimport pyverbs.device\n"},
    ),
    Rule(
        name="the product knows no stand-ins",
        why="There is one code path: a branch for software would be the one that is tested.",
        breaches=_stand_ins,
        must_fail={"gdrkit/verbs/nic.py": "is_simulated = False\n"},
        must_pass={_SUBSTRATE: "WORD = 'simulated'\n", "gdrkit/verbs/nic.py": "name = 'mlx5_0'\n"},
    ),
    Rule(
        name="nothing is replaced under a case",
        why="A case that swaps a function of the real API proves what the case says, not what the API does.",
        breaches=_replacing,
        must_fail={"suites/rdma/test_a.py": "def test(monkeypatch):\n    monkeypatch.setattr('a.b', 1)\n"},
        must_pass={
            "suites/rdma/test_a.py": "def test(monkeypatch):\n    monkeypatch.setenv('A', 'b')\n",
            "suites/meta/defects/test_b.py": "from unittest import mock\n",
        },
    ),
    Rule(
        name="only the harness skips",
        why="What does not run is declared by @needs before the body, with every reason; a skip inside hides it.",
        breaches=_skips,
        must_fail={"suites/rdma/test_a.py": "import pytest\n@pytest.mark.skipif(True, reason='')\ndef test(): ...\n"},
        must_pass={"gdrkit/harness/plugin.py": "import pytest\ndef run():\n    pytest.skip('reason')\n"},
    ),
    Rule(
        name="no failure is swallowed",
        why="Who catches everything also catches what nobody thought of, and says that it went well.",
        breaches=_swallowed,
        must_fail={"gdrkit/units.py": "try:\n    f()\nexcept Exception:\n    pass\n"},
        must_pass={"gdrkit/units.py": "try:\n    f()\nexcept Exception as error:\n    raise ValueError from error\n"},
    ),
    Rule(
        name="no finalizer takes a lock",
        why="The garbage collector runs finalizers inside any allocation, also of the thread that holds the lock.",
        breaches=_locked_finalizers,
        must_fail={
            "gdrkit/handles.py": "class Handle:\n    def release(self):\n        with _lock:\n            pass\n",
            "gdrkit/buffers.py": "from gdrkit.handles import Handle\nclass Range:\n    def close(self):\n"
            "        self.handle.release()\n    def __del__(self):\n        self.close()\n",
        },
        must_pass={
            "gdrkit/handles.py": "class Handle:\n    def release(self):\n        _live.pop(self.number, None)\n"
            "    def __del__(self):\n        self.release()\n    def other(self):\n        with _lock:\n"
            "            pass\n",
        },
    ),
    Rule(
        name="descriptors are received in one place",
        why="Who forgets MSG_CMSG_CLOEXEC or MSG_CTRUNC leaks descriptors to programs, or believes half a message.",
        breaches=_receiving,
        must_fail={"gdrkit/storage/connection.py": "import socket\nsocket.recv_fds(end, 4096, 4)\n"},
        must_pass={_RECEIVER: "connection.recvmsg(1, 1, 1)\n"},
    ),
    Rule(
        name="no case sleeps",
        why="A sleep is too short on a slow machine and too long on all others; wait for what is to happen.",
        breaches=_sleeps,
        must_fail={"suites/rdma/test_a.py": "from time import sleep\nsleep(1)\n"},
        must_pass={"suites/rdma/test_a.py": "import time\ntime.monotonic()\n"},
    ),
    Rule(
        name="a module says what it is for and what it offers",
        why="A newcomer reads the docstring first; what is not in __all__ may change.",
        breaches=_introduced,
        must_fail={"gdrkit/units.py": "'''Sizes.'''\nKIB = 1024\n"},
        must_pass={"gdrkit/units.py": "'''Sizes.'''\n__all__ = ['KIB']\nKIB = 1024\n"},
    ),
    Rule(
        name="nothing is left to be done in the sources",
        why="What is missing is said in an issue, where somebody will see it.",
        breaches=_unfinished,
        must_fail={"native/a.cpp": "// FIX" + "ME later\n"},
        must_pass={"native/a.cpp": "// The kernel fixes the address.\n"},
    ),
    Rule(
        name="no record and no page names a place of the machine that made it",
        why="A library is known by its name, its build id and where it lies in an environment; the rest tells nobody "
        "anything, and may tell who made the record.",
        breaches=_places,
        must_fail={"reports/baselines/bare/a.jsonl": '{"path": "/home/me/lib/libcuda.so.1"}\n'},
        must_pass={"reports/baselines/bare/a.jsonl": '{"path": "{python}/opt/a.so", "soname": "/usr/lib/a.so"}\n'},
    ),
    Rule(
        name="every top-level folder introduces itself",
        why="A newcomer finds the room by its name, and learns from its README what is in it.",
        breaches=_readmes,
        must_fail={"attic/old.py": ""},
        must_pass={"docs/README.md": "# docs\n", ".git/config": "", "build/a": ""},
    ),
    Rule(
        name="words that were replaced stay away",
        why="Readers search for the terms of rdma-core, CUDA and the manuals; half of them are not native speakers.",
        breaches=language.gone_words,
        must_fail={"automation/a.py": "# The house is cleaned by nobody.\n"},
        must_pass={"automation/a.py": "# The project is checked by the CI; there is room for two more.\n"},
    ),
    Rule(
        name="comments and docstrings have a subject and a verb",
        why="A clause that begins with who, what or of has to be read twice.",
        breaches=language.headless_openings,
        must_fail={"automation/a.py": "# What is leased when the cache ends.\n"},
        must_pass={"automation/a.py": "# A lease that is held, and\n# what it covers, stays.\n# Why? See cache.py.\n"},
    ),
    Rule(
        name="a name of a case has at most 60 characters",
        why="Names are columns of reports and lines of terminals.",
        breaches=language.long_test_names,
        must_fail={"automation/test_a.py": f"def test_{'x' * 60}():\n"},
        must_pass={"automation/test_a.py": f"def test_{'x' * 55}():\n"},
    ),
)
