"""Checks of the project's rules in a source tree, one public function for each rule of rules.py.

Each function yields one line for every violation in the tree at ``root``. The functions read the sources and never
import them.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from meta.levels import IMPORT_CIRCLES, IMPORT_LEVELS, IMPORTS_WITHIN_A_LEVEL, SEAMS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "CATCH_ALL_FILES",
    "RECEIVER_FILE",
    "SUBSTRATE_FILE",
    "find_cross_package_imports",
    "find_descriptor_receivers",
    "find_import_circles",
    "find_imports_outside_seams",
    "find_imports_within_level",
    "find_locking_finalizers",
    "find_machine_paths",
    "find_missing_docstrings_and_dunder_all",
    "find_missing_readmes",
    "find_packages_without_level",
    "find_replaced_functions",
    "find_skips_outside_harness",
    "find_sleeping_cases",
    "find_stand_in_words",
    "find_swallowed_errors",
    "find_unfinished_work",
    "find_upward_imports",
]

# These files may catch every exception: they run all actions of a list, and then raise or pass on the exceptions.
CATCH_ALL_FILES: frozenset[str] = frozenset({"gdrkit/handles.py"})

# Functions that import or search for the module that their first argument names.
_IMPORT_FUNCTIONS = {"__import__", "find_spec", "import_module", "import_native"}

# Words for a stand-in of a real library. Only report/substrate.py may contain them, because only that file may
# determine whether a loaded library is a stand-in.
_STAND_IN_WORD_PATTERN = re.compile(r"(?<![a-z])(mock|fake|stub|simulat)\w*", re.IGNORECASE)
SUBSTRATE_FILE = "gdrkit/report/substrate.py"
# Only this file may receive file descriptors.
RECEIVER_FILE = "gdrkit/scm_rights.py"

# find_unfinished_work() searches the files with these suffixes.
_SEARCHED_SUFFIXES = (
    ".py",
    ".cpp",
    ".hpp",
    ".h",
    ".md",
    ".toml",
    ".ini",
    ".sh",
    ".txt",
    ".yaml",
    ".yml",
    ".cmake",
    ".html",
)
# Each word in this pattern is written in two parts, so that this file does not violate the rule.
_UNFINISHED_WORK_PATTERN = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")

# Paths below these folders exist only on one machine, or for one user.
_MACHINE_PATH_PATTERN = re.compile(r"(?<![\w}./-])/(?:work|opt|home|root|Users)/[^\s\"'<&]*")


def _parse_modules(root: Path, *relative_paths: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path below `root` and the syntax tree of every Python file in these files and folders."""
    for relative_path in relative_paths:
        file_or_folder = root / relative_path
        for path in sorted(file_or_folder.rglob("*.py")) if file_or_folder.is_dir() else [file_or_folder]:
            if path.is_file():
                yield path.relative_to(root).as_posix(), ast.parse(path.read_text(), filename=str(path))


def _find_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line number and full dotted name of every import, also of imports inside functions and by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _get_function_name(node) in _IMPORT_FUNCTIONS and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value
            elif isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
                # The argument is an f-string. Only its constant beginning is known.
                yield node.lineno, str(argument.values[0].value)


def _get_function_name(node: ast.Call) -> str:
    """Return the last name of the called function: ``sleep`` for ``time.sleep(1)``."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _get_dotted_name(node: ast.expr) -> str:
    """Return the dotted name of an expression, e.g. ``pytest.mark.skipif``; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        prefix = _get_dotted_name(node.value)
        return f"{prefix}.{node.attr}" if prefix else ""
    return node.id if isinstance(node, ast.Name) else ""


def _get_package(path: str) -> str:
    """Return the package of a file: ``cuda`` for gdrkit/cuda/device.py, ``errors`` for gdrkit/errors.py."""
    return path.split("/")[1].removesuffix(".py")


def _get_level(package: str) -> int | None:
    """Return the level of a package, or None if levels.py does not list the package."""
    return next((level for level, packages in enumerate(IMPORT_LEVELS) if package in packages), None)


def find_cross_package_imports(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield location, importing package and imported package of every import between two packages."""
    for path, tree in _parse_modules(root, "gdrkit"):
        for line_number, imported_name in _find_imports(tree):
            top_level, _, submodule = imported_name.partition(".")
            imported_package = submodule.partition(".")[0]
            if (
                top_level == "gdrkit"
                and imported_package
                and imported_package not in {_get_package(path), "__version__"}
            ):
                yield f"{path}:{line_number}", _get_package(path), imported_package


def find_packages_without_level(root: Path) -> Iterator[str]:
    """Yield the packages and modules of gdrkit that levels.py does not list."""
    for path, _ in _parse_modules(root, "gdrkit"):
        if _get_level(_get_package(path)) is None:
            yield f"{path}: {_get_package(path)} has no level; give it one in suites/meta/levels.py"


def find_upward_imports(root: Path) -> Iterator[str]:
    """Yield the imports in which the imported package has a higher level, or one package has no level."""
    for location, package, imported_package in find_cross_package_imports(root):
        level, imported_level = _get_level(package), _get_level(imported_package)
        if level is None or imported_level is None or imported_level > level:
            yield f"{location} (level {level}) imports gdrkit.{imported_package} (level {imported_level})"


def find_imports_within_level(root: Path) -> Iterator[str]:
    """Yield the imports of packages of the same level that levels.py does not permit."""
    for location, package, imported_package in find_cross_package_imports(root):
        if (
            _get_level(package) == _get_level(imported_package)
            and (package, imported_package) not in IMPORTS_WITHIN_A_LEVEL
        ):
            yield f"{location} imports gdrkit.{imported_package}, a package of the same level {_get_level(package)}"


def _find_imported_modules(root: Path) -> dict[str, set[str]]:
    """Return, for each module of gdrkit, the modules of its own package that it imports anywhere in its source."""
    trees_by_module = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for path, tree in _parse_modules(root, "gdrkit")
    }
    imports_by_module: dict[str, set[str]] = {}
    for module, tree in trees_by_module.items():
        package_parts = module.split(".")[:2]
        # For `from module import function`, _find_imports() yields module.function. The imported module is the part
        # before the last dot.
        imported_names = {
            name if name in trees_by_module or name in SEAMS else name.rpartition(".")[0]
            for _line, name in _find_imports(tree)
        }
        imports_by_module[module] = {
            name for name in imported_names & trees_by_module.keys() - {module} if name.split(".")[:2] == package_parts
        }
    return imports_by_module


def _find_transitive_imports(module: str, imports_by_module: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that a module imports, directly or through other modules."""
    visited, unvisited = set[str](), [module]
    while unvisited:
        new_modules = imports_by_module[unvisited.pop()] - visited
        visited |= new_modules
        unvisited += new_modules
    return visited


def find_import_circles(root: Path) -> Iterator[str]:
    """Yield the import circles inside packages, and the circles that levels.py permits but that no longer exist.

    An import inside a function or below ``TYPE_CHECKING`` counts, because both modules still depend on each other.
    """
    imports_by_module = _find_imported_modules(root)
    transitive_imports_by_module = {
        module: _find_transitive_imports(module, imports_by_module) for module in imports_by_module
    }
    circles = {
        frozenset(
            other for other in transitive_imports_by_module[module] if module in transitive_imports_by_module[other]
        )
        for module in imports_by_module
        if module in transitive_imports_by_module[module]
    }
    yield from (f"{', '.join(sorted(circle))} import each other" for circle in circles - IMPORT_CIRCLES)
    for circle in IMPORT_CIRCLES - circles:
        if circle <= imports_by_module.keys():
            yield f"{', '.join(sorted(circle))} no longer import each other: remove the set from suites/meta/levels.py"


def find_imports_outside_seams(root: Path) -> Iterator[str]:
    """Yield the imports of foreign libraries in files in which levels.py does not permit these imports."""
    for path, tree in _parse_modules(root, "gdrkit"):
        for line_number, name in _find_imports(tree):
            allowed_files = next(
                (files for module, files in SEAMS.items() if f"{name}.".startswith(f"{module}.")), None
            )
            if allowed_files is not None and path not in allowed_files:
                yield f"{path}:{line_number} names {name}, which only {', '.join(sorted(allowed_files))} may name"


def find_stand_in_words(root: Path) -> Iterator[str]:
    """Yield the words in gdrkit/ that name a stand-in, such as mock and simulated, outside of `SUBSTRATE_FILE`."""
    for path in sorted((root / "gdrkit").rglob("*.py")):
        relative_path = path.relative_to(root).as_posix()
        if relative_path != SUBSTRATE_FILE:
            for line_number, line in enumerate(path.read_text().splitlines(), start=1):
                yield from (
                    f"{relative_path}:{line_number} contains {match[0]}"
                    for match in _STAND_IN_WORD_PATTERN.finditer(line)
                )


def find_replaced_functions(root: Path) -> Iterator[str]:
    """Yield the imports of mock libraries and the calls that replace functions, except in suites/meta/defects."""
    for path, tree in _parse_modules(root, "suites", "gdrkit"):
        if path.startswith("suites/meta/defects/"):
            continue
        for line_number, name in _find_imports(tree):
            if name.startswith(("unittest.mock", "mock.", "pytest_mock")) or name == "mock":
                yield f"{path}:{line_number} imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _get_dotted_name(node.func).endswith(
                ("monkeypatch.setattr", "mocker.patch")
            ):
                yield f"{path}:{node.lineno} calls {_get_dotted_name(node.func)}"


def find_skips_outside_harness(root: Path) -> Iterator[str]:
    """Yield the names by which pytest or unittest skips cases, outside of gdrkit/harness."""
    banned_names = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"}
    for path, tree in _parse_modules(root, "suites", "gdrkit"):
        if path.startswith("gdrkit/harness/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _get_dotted_name(node) in banned_names:
                yield f"{path}:{node.lineno} has {_get_dotted_name(node)}"
        for line_number, name in _find_imports(tree):
            if name in {"pytest.skip", "pytest.importorskip", "unittest.skip", "unittest.skipIf"}:
                yield f"{path}:{line_number} imports {name}"


def _raises_or_exits(node: ast.AST) -> bool:
    """Return whether the node reports a failure: it raises an exception or ends the process."""
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _get_dotted_name(node.func) == "os._exit")


def find_swallowed_errors(root: Path) -> Iterator[str]:
    """Yield the handlers that catch every exception and neither raise one nor end the process.

    Also yield the calls of suppress() with `Exception` or `BaseException`.
    """
    catch_all_types = {"Exception", "BaseException"}
    for path, tree in _parse_modules(root, "gdrkit", "suites", "native", "automation", "noxfile.py"):
        for node in ast.walk(tree) if path not in CATCH_ALL_FILES else ():
            if isinstance(node, ast.ExceptHandler):
                caught_types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                catches_all = any(
                    caught_type is None or _get_dotted_name(caught_type) in catch_all_types
                    for caught_type in caught_types
                )
                if catches_all and not any(map(_raises_or_exits, ast.walk(node))):
                    yield f"{path}:{node.lineno} catches every exception and raises none"
            elif isinstance(node, ast.Call) and _get_function_name(node) == "suppress":
                suppressed_types = catch_all_types & set(map(_get_dotted_name, node.args))
                yield from (f"{path}:{node.lineno} suppresses {name}" for name in suppressed_types)


# Methods that can wait for a lock or for another thread.
_BLOCKING_METHODS = {"acquire", "join", "wait", "wait_for"}


def _find_functions(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Return the definitions of functions and methods of a module by name.

    The name of a class stands for its constructor.
    """
    definitions_by_name: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            definitions_by_name.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
            definitions_by_name.setdefault(node.name, []).extend(constructors)
    return definitions_by_name


def _find_finalizers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions that the garbage collector calls: ``__del__``, and callbacks of weak references."""
    callback_argument_indexes = {"finalize": 1, "proxy": 1, "ref": 1}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node.name
        elif isinstance(node, ast.Call) and _get_dotted_name(node.func).rpartition(".")[0] in {"", "weakref"}:
            callback_index = callback_argument_indexes.get(_get_function_name(node))
            if callback_index is not None and len(node.args) > callback_index:
                yield _get_dotted_name(node.args[callback_index]).rpartition(".")[2]


def _takes_lock(node: ast.AST) -> bool:
    """Return whether the node is a ``with`` statement on a lock, or a call of one of `_BLOCKING_METHODS`."""
    if isinstance(node, ast.With):
        # Some condition variables have a name that ends with _changed.
        names = [_get_dotted_name(item.context_expr).rpartition(".")[2] for item in node.items]
        return any(re.search(r"lock|condition|_changed", name, re.IGNORECASE) for name in names)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _BLOCKING_METHODS


def _find_callable_functions(tree: ast.Module, trees_by_path: Mapping[str, ast.Module]) -> dict[str, list[ast.AST]]:
    """Return the functions of a module and of the modules of gdrkit that it imports, by name."""
    definitions_by_name = _find_functions(tree)
    for _line, name in _find_imports(tree):
        name_parts = name.split(".")
        # The imported module is the whole name or a beginning of it: gdrkit.cuda in `from gdrkit.cuda import Device`.
        paths = ("/".join(name_parts[:end]) + ".py" for end in range(2, len(name_parts) + 1))
        for imported_tree in (trees_by_path[path] for path in paths if path in trees_by_path):
            for function_name, nodes in _find_functions(imported_tree).items():
                definitions_by_name.setdefault(function_name, []).extend(nodes)
    return definitions_by_name


def find_locking_finalizers(root: Path) -> Iterator[str]:
    """Yield finalizers that can wait for a lock. False alarms are possible.

    A call counts as a call of every function of that name in the module and in the modules of gdrkit that it imports.
    """
    trees_by_path = dict(_parse_modules(root, "gdrkit"))
    for path, tree in trees_by_path.items():
        definitions_by_name, unvisited, visited = (
            _find_callable_functions(tree, trees_by_path),
            list(_find_finalizers(tree)),
            set[str](),
        )
        while unvisited:
            function_name = unvisited.pop()
            definitions = () if function_name in visited else definitions_by_name.get(function_name, ())
            nodes = [node for definition in definitions for node in ast.walk(definition)]
            visited.add(function_name)
            unvisited += (_get_function_name(node) for node in nodes if isinstance(node, ast.Call))
            yield from (
                f"{path}: a finalizer calls {function_name}(), which waits for a lock"
                for _ in filter(_takes_lock, nodes)
            )


def find_descriptor_receivers(root: Path) -> Iterator[str]:
    """Yield the calls that receive file descriptors outside of `RECEIVER_FILE`."""
    for path, tree in _parse_modules(root, "gdrkit"):
        for node in ast.walk(tree) if path != RECEIVER_FILE else ():
            if isinstance(node, ast.Call) and _get_function_name(node) in {"recv_fds", "recvmsg", "recvmsg_into"}:
                yield f"{path}:{node.lineno} calls {_get_function_name(node)}"


def find_sleeping_cases(root: Path) -> Iterator[str]:
    """Yield the calls of sleep() in the suites."""
    for path, tree in _parse_modules(root, "suites"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _get_function_name(node) == "sleep":
                yield f"{path}:{node.lineno} sleeps"


def find_missing_docstrings_and_dunder_all(root: Path) -> Iterator[str]:
    """Yield the modules without a docstring, and the modules of gdrkit/ and native/ (not tests) without ``__all__``."""
    for path, tree in _parse_modules(root, "gdrkit", "suites", "native", "automation", "noxfile.py"):
        if not ast.get_docstring(tree):
            yield f"{path} has no docstring"
        needs_dunder_all = path.startswith(("gdrkit/", "native/")) and "/tests/" not in path
        if needs_dunder_all and not any(
            isinstance(target, ast.Name) and target.id == "__all__"
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ):
            yield f"{path} has no __all__"


def find_unfinished_work(root: Path) -> Iterator[str]:
    """Yield the notes about unfinished work in the sources."""
    # These folders are left out, because other cases fill and remove them at the same time.
    generated_folders = {"build", "runs"}
    file_paths = []
    for folder, subfolders, file_names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in generated_folders and not name.startswith(".")]
        file_paths += [Path(folder, name) for name in file_names if not name.startswith(".")]
    for path in sorted(file_paths):
        relative_path = path.relative_to(root).as_posix()
        if path.suffix not in _SEARCHED_SUFFIXES:
            continue
        for line_number, line in enumerate(path.read_text().splitlines(), start=1):
            yield from (
                f"{relative_path}:{line_number} contains {match[0]}"
                for match in _UNFINISHED_WORK_PATTERN.finditer(line)
            )


def find_machine_paths(root: Path) -> Iterator[str]:
    """Yield machine-specific paths in records and in the pages that are made from records."""
    generated_files = [*(root / "reports" / "baselines").rglob("*"), *(root / "docs").rglob("*.html")]
    for path in sorted(path for path in generated_files if path.is_file()):
        machine_paths = dict.fromkeys(_MACHINE_PATH_PATTERN.findall(path.read_text()))
        yield from (f"{path.relative_to(root)} contains {machine_path}" for machine_path in machine_paths)


def find_missing_readmes(root: Path) -> Iterator[str]:
    """Yield the top-level folders without a README."""
    generated_folders = {"__pycache__", "build", "dist"}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if folder.name not in generated_folders and not (folder / "README.md").is_file():
            yield f"{folder.name}/ has no README.md"
