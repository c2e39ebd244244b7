"""The checks of the rules: each looks at a source tree and yields a line for every breach.

Sources are parsed and never imported.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from meta.levels import IMPORT_CIRCLES, LEVELS, SAME_LEVEL, SEAMS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "CARRY_ON",
    "RECEIVER",
    "SUBSTRATE",
    "crossings",
    "import_circles",
    "imports_outside_seams",
    "imports_within_level",
    "locked_finalizers",
    "machine_paths",
    "missing_introductions",
    "missing_readmes",
    "other_receivers",
    "packages_without_level",
    "replaced_apis",
    "skips_outside_harness",
    "sleeping_cases",
    "stand_in_words",
    "swallowed_errors",
    "unfinished_work",
    "upward_imports",
]

# These files catch every exception so that all actions of a list run, and raise or pass on what they caught.
CARRY_ON: frozenset[str] = frozenset({"gdrkit/handles.py"})

_IMPORTERS = {"__import__", "find_spec", "import_module", "import_native"}

# A reader would search for stand-ins by these words. Only report/substrate.py may say what was a stand-in.
_STAND_IN_WORDS = re.compile(r"(?<![a-z])(mock|fake|stub|simulat)\w*", re.IGNORECASE)
SUBSTRATE = "gdrkit/report/substrate.py"
RECEIVER = "gdrkit/scm_rights.py"

_SOURCES = (".py", ".cpp", ".hpp", ".h", ".md", ".toml", ".ini", ".sh", ".txt", ".yaml", ".yml", ".cmake", ".html")
# The words are split, so that this file does not violate the rule.
_UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


# Paths below these folders exist only on one machine, or for one user.
_MACHINE_PLACES = re.compile(r"(?<![\w}./-])/(?:work|opt|home|root|Users)/[^\s\"'<&]*")


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


def _package(path: str) -> str:
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
            if package == "gdrkit" and other and other not in {_package(path), "__version__"}:
                yield f"{path}:{line}", _package(path), other


def packages_without_level(root: Path) -> Iterator[str]:
    for path, _ in _modules(root, "gdrkit"):
        if _level(_package(path)) is None:
            yield f"{path}: {_package(path)} has no level; give it one in suites/meta/levels.py"


def upward_imports(root: Path) -> Iterator[str]:
    for place, room, other in crossings(root):
        above, below = _level(room), _level(other)
        if above is None or below is None or below > above:
            yield f"{place} (level {above}) imports gdrkit.{other} (level {below})"


def imports_within_level(root: Path) -> Iterator[str]:
    for place, room, other in crossings(root):
        if _level(room) == _level(other) and (room, other) not in SAME_LEVEL:
            yield f"{place} imports gdrkit.{other}, a room of its own level {_level(room)}"


def _imported_modules(root: Path) -> dict[str, set[str]]:
    """Return the modules of its own package that each module of gdrkit imports, at any position in its source."""
    trees = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for path, tree in _modules(root, "gdrkit")
    }
    imported: dict[str, set[str]] = {}
    for module, tree in trees.items():
        package = module.split(".")[:2]
        names = {name if name in trees or name in SEAMS else name.rpartition(".")[0] for _line, name in _imports(tree)}
        imported[module] = {name for name in names & trees.keys() - {module} if name.split(".")[:2] == package}
    return imported


def _reached(module: str, imported: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    reached, waiting = set[str](), [module]
    while waiting:
        new = imported[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def import_circles(root: Path) -> Iterator[str]:
    """Yield the circles of imports inside packages, and the exceptions in levels.py that no longer have a circle.

    An import inside a function or below ``TYPE_CHECKING`` counts: it delays the circle, and both modules still need
    each other.
    """
    imported = _imported_modules(root)
    reached = {module: _reached(module, imported) for module in imported}
    circles = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imported
        if module in reached[module]
    }
    yield from (f"{', '.join(sorted(circle))} import each other" for circle in circles - IMPORT_CIRCLES)
    for circle in IMPORT_CIRCLES - circles:
        if circle <= imported.keys():
            yield f"{', '.join(sorted(circle))} no longer import each other: remove the set from suites/meta/levels.py"


def imports_outside_seams(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "gdrkit"):
        for line, name in _imports(tree):
            allowed = next((files for module, files in SEAMS.items() if f"{name}.".startswith(f"{module}.")), None)
            if allowed is not None and path not in allowed:
                yield f"{path}:{line} names {name}; only {', '.join(sorted(allowed))} may"


def stand_in_words(root: Path) -> Iterator[str]:
    for path in sorted((root / "gdrkit").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        if where != SUBSTRATE:
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                yield from (f"{where}:{number} says {found[0]}" for found in _STAND_IN_WORDS.finditer(line))


def replaced_apis(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "suites", "gdrkit"):
        if path.startswith("suites/meta/defects/"):
            continue
        for line, name in _imports(tree):
            if name.startswith(("unittest.mock", "mock.", "pytest_mock")) or name == "mock":
                yield f"{path}:{line} imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _dotted(node.func).endswith(("monkeypatch.setattr", "mocker.patch")):
                yield f"{path}:{node.lineno} calls {_dotted(node.func)}"


def skips_outside_harness(root: Path) -> Iterator[str]:
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


def swallowed_errors(root: Path) -> Iterator[str]:
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


def locked_finalizers(root: Path) -> Iterator[str]:
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


def other_receivers(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "gdrkit"):
        for node in ast.walk(tree) if path != RECEIVER else ():
            if isinstance(node, ast.Call) and _called(node) in {"recv_fds", "recvmsg", "recvmsg_into"}:
                yield f"{path}:{node.lineno} calls {_called(node)}"


def sleeping_cases(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "suites"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) == "sleep":
                yield f"{path}:{node.lineno} sleeps"


def missing_introductions(root: Path) -> Iterator[str]:
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


def unfinished_work(root: Path) -> Iterator[str]:
    generated = {"build", "reports/runs"}
    for path in sorted(root.rglob("*")):
        where = path.relative_to(root).as_posix()
        if path.suffix not in _SOURCES or where.startswith(".") or any(where.startswith(f"{it}/") for it in generated):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            yield from (f"{where}:{number} has {found[0]}" for found in _UNFINISHED.finditer(line))


def machine_paths(root: Path) -> Iterator[str]:
    """Yield machine-specific paths in records and in the pages that are made of them."""
    made = [*(root / "reports" / "baselines").rglob("*"), *(root / "docs").rglob("*.html")]
    for path in sorted(path for path in made if path.is_file()):
        found = dict.fromkeys(_MACHINE_PLACES.findall(path.read_text()))
        yield from (f"{path.relative_to(root)} names {place}" for place in found)


def missing_readmes(root: Path) -> Iterator[str]:
    made = {"__pycache__", "build", "dist"}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if folder.name not in made and not (folder / "README.md").is_file():
            yield f"{folder.name}/ has no README.md"
