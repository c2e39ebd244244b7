"""The checks of the rules. Each yields one line for every violation in a source tree.

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
    "CATCH_ALL_FILES",
    "RECEIVER",
    "SUBSTRATE",
    "cross_package_imports",
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
CATCH_ALL_FILES: frozenset[str] = frozenset({"gdrkit/handles.py"})

_IMPORTERS = {"__import__", "find_spec", "import_module", "import_native"}

# Only report/substrate.py may determine whether a library is a stand-in.
_STAND_IN_WORDS = re.compile(r"(?<![a-z])(mock|fake|stub|simulat)\w*", re.IGNORECASE)
SUBSTRATE = "gdrkit/report/substrate.py"
RECEIVER = "gdrkit/scm_rights.py"

_SOURCES = (".py", ".cpp", ".hpp", ".h", ".md", ".toml", ".ini", ".sh", ".txt", ".yaml", ".yml", ".cmake", ".html")
# The words are split, so that this file does not violate the rule.
_UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

# Paths below these folders exist only on one machine, or for one user.
_MACHINE_PATHS = re.compile(r"(?<![\w}./-])/(?:work|opt|home|root|Users)/[^\s\"'<&]*")


def _modules(root: Path, *sources: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield path and syntax tree of every Python file in these files and folders."""
    for source in sources:
        start = root / source
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
        elif isinstance(node, ast.Call) and _function_name(node) in _IMPORTERS and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value
            elif isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
                yield node.lineno, str(first.values[0].value)


def _function_name(node: ast.Call) -> str:
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


def _level(package: str) -> int | None:
    return next((level for level, packages in enumerate(LEVELS) if package in packages), None)


def cross_package_imports(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield location, importing package and imported package of every import between two packages."""
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
    for location, package, imported in cross_package_imports(root):
        above, below = _level(package), _level(imported)
        if above is None or below is None or below > above:
            yield f"{location} (level {above}) imports gdrkit.{imported} (level {below})"


def imports_within_level(root: Path) -> Iterator[str]:
    for location, package, imported in cross_package_imports(root):
        if _level(package) == _level(imported) and (package, imported) not in SAME_LEVEL:
            yield f"{location} imports gdrkit.{imported}, a package of the same level {_level(package)}"


def _imported_modules(root: Path) -> dict[str, set[str]]:
    """Return, for each module of gdrkit, the modules of its own package that it imports anywhere in its source."""
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

    An import inside a function or below ``TYPE_CHECKING`` counts, because both modules still depend on each other.
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
                yield from (f"{where}:{number} contains {word[0]}" for word in _STAND_IN_WORDS.finditer(line))


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


def _raises_or_exits(node: ast.AST) -> bool:
    """Return whether the node reports a failure: it raises an exception or ends the process."""
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _dotted(node.func) == "os._exit")


def swallowed_errors(root: Path) -> Iterator[str]:
    everything = {"Exception", "BaseException"}
    for path, tree in _modules(root, "gdrkit", "suites", "native", "automation", "noxfile.py"):
        for node in ast.walk(tree) if path not in CATCH_ALL_FILES else ():
            if isinstance(node, ast.ExceptHandler):
                types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                catches_all = any(each is None or _dotted(each) in everything for each in types)
                if catches_all and not any(map(_raises_or_exits, ast.walk(node))):
                    yield f"{path}:{node.lineno} catches every exception and raises none"
            elif isinstance(node, ast.Call) and _function_name(node) == "suppress":
                suppressed = everything & set(map(_dotted, node.args))
                yield from (f"{path}:{node.lineno} suppresses {name}" for name in suppressed)


_LOCKING = {"acquire", "join", "wait", "wait_for"}


def _functions(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Return every function and method of a module by its name. A class is represented by its constructor."""
    functions: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            constructors = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            functions.setdefault(node.name, []).extend(constructors)
    return functions


def _finalizers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions that the garbage collector calls: ``__del__``, and callbacks of weak references."""
    callback_arguments = {"finalize": 1, "proxy": 1, "ref": 1}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node.name
        elif isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[0] in {"", "weakref"}:
            index = callback_arguments.get(_function_name(node))
            if index is not None and len(node.args) > index:
                yield _dotted(node.args[index]).rpartition(".")[2]


def _locks(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        names = [_dotted(item.context_expr).rpartition(".")[2] for item in node.items]
        return any(re.search(r"lock|condition|_changed", name, re.IGNORECASE) for name in names)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOCKING


def _callable_functions(tree: ast.Module, trees: Mapping[str, ast.Module]) -> dict[str, list[ast.AST]]:
    """Return the functions of a module and of the modules of gdrkit that it imports, by name."""
    functions = _functions(tree)
    for _line, name in _imports(tree):
        parts = name.split(".")
        paths = ("/".join(parts[:end]) + ".py" for end in range(2, len(parts) + 1))
        for other in (trees[path] for path in paths if path in trees):
            for function, nodes in _functions(other).items():
                functions.setdefault(function, []).extend(nodes)
    return functions


def locked_finalizers(root: Path) -> Iterator[str]:
    """Yield finalizers that can wait for a lock. Calls are followed by name alone, so a false alarm is possible."""
    trees = dict(_modules(root, "gdrkit"))
    for path, tree in trees.items():
        functions, unvisited, visited = _callable_functions(tree, trees), list(_finalizers(tree)), set[str]()
        while unvisited:
            name = unvisited.pop()
            nodes = () if name in visited else [node for each in functions.get(name, ()) for node in ast.walk(each)]
            visited.add(name)
            unvisited += (_function_name(node) for node in nodes if isinstance(node, ast.Call))
            yield from (f"{path}: a finalizer calls {name}(), which waits for a lock" for _ in filter(_locks, nodes))


def other_receivers(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "gdrkit"):
        for node in ast.walk(tree) if path != RECEIVER else ():
            if isinstance(node, ast.Call) and _function_name(node) in {"recv_fds", "recvmsg", "recvmsg_into"}:
                yield f"{path}:{node.lineno} calls {_function_name(node)}"


def sleeping_cases(root: Path) -> Iterator[str]:
    for path, tree in _modules(root, "suites"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _function_name(node) == "sleep":
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
        if path.suffix not in _SOURCES or where.startswith((".", *(f"{folder}/" for folder in generated))):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            yield from (f"{where}:{number} contains {word[0]}" for word in _UNFINISHED.finditer(line))


def machine_paths(root: Path) -> Iterator[str]:
    """Yield machine-specific paths in records and in the pages that are made of them."""
    generated = [*(root / "reports" / "baselines").rglob("*"), *(root / "docs").rglob("*.html")]
    for path in sorted(path for path in generated if path.is_file()):
        found = dict.fromkeys(_MACHINE_PATHS.findall(path.read_text()))
        yield from (f"{path.relative_to(root)} contains {each}" for each in found)


def missing_readmes(root: Path) -> Iterator[str]:
    generated = {"__pycache__", "build", "dist"}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if folder.name not in generated and not (folder / "README.md").is_file():
            yield f"{folder.name}/ has no README.md"
