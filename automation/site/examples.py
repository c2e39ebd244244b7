"""Functions that find the programs that show how each public name of gdrkit is used.

A program shows a name if it uses the name, or a function, method or property that returns objects of the named class.
"""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING, Any

from automation.site.reference import list_public_modules
from automation.site.snippets import ROOT, find_snippets, find_used_names, list_example_files, list_guides

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["list_all_programs", "map_names_to_programs"]


def list_all_programs() -> dict[str, list[str]]:
    """Return the sources of the examples and of the Python snippets in the guides, by the path of their file."""
    programs = {path.relative_to(ROOT).as_posix(): [path.read_text()] for path in list_example_files()}
    for path in list_guides():
        texts = [snippet.text for snippet in find_snippets(path) if snippet.language == "python"]
        if texts:
            programs[path.relative_to(ROOT).as_posix()] = texts
    return programs


def map_names_to_programs(programs: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return, for the full name of each public object, the paths of the programs that show it."""
    names_by_object: dict[int, list[str]] = {}
    public_objects: dict[int, Any] = {}
    for module_name, module in list_public_modules().items():
        for name in module.__all__:
            public_object = getattr(module, name)
            public_objects[id(public_object)] = public_object
            names_by_object.setdefault(id(public_object), []).append(f"{module_name}.{name}")
    producers_by_object = {
        object_id: set(_find_producers(public_object))
        for object_id, public_object in public_objects.items()
        if inspect.isclass(public_object)
    }
    programs_by_object: dict[int, set[str]] = {object_id: set() for object_id in public_objects}
    for path, sources in programs.items():
        full_names = {name for source in sources for name in find_used_names(source)}
        unqualified_names = {name.rpartition(".")[2] for name in full_names} | {
            name for source in sources for name in _find_attributes(source)
        }
        packages = {".".join(name.split(".")[:2]) for name in full_names}
        # `obj.method()` does not show to which package `obj` belongs. So a method name is matched with the methods of
        # every package that the program uses.
        possible_producers = {(package, name) for package in packages for name in unqualified_names}
        for object_id, names in names_by_object.items():
            if full_names & set(names) or possible_producers & producers_by_object.get(object_id, set()):
                programs_by_object[object_id].add(path)
    # A program that shows a class also shows its bases.
    for object_id, public_object in public_objects.items():
        for base in public_object.__mro__[1:] if inspect.isclass(public_object) else ():
            if id(base) in programs_by_object:
                programs_by_object[id(base)] |= programs_by_object[object_id]
    return {
        name: sorted(programs_by_object[object_id]) for object_id, names in names_by_object.items() for name in names
    }


def _find_attributes(source: str) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def _find_producers(produced_class: type) -> Iterator[tuple[str, str]]:
    """Yield the package and the name of each function, method and property that returns objects of the class."""
    package = ".".join(produced_class.__module__.split(".")[:2])
    class_name_pattern = re.compile(rf"\b{produced_class.__name__}\b")
    for module_name, module in list_public_modules().items():
        if not f"{module_name}.".startswith(f"{package}."):
            continue
        for name in module.__all__:
            public_object = getattr(module, name)
            members = vars(public_object).items() if inspect.isclass(public_object) else [(name, public_object)]
            for member_name, member in members:
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if class_name_pattern.search(str(getattr(function, "__annotations__", {}).get("return", ""))):
                    yield package, member_name
