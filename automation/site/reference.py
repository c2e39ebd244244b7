"""The pages of the reference, made from the code: every public name, every command, every error and exit code."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import pkgutil
import re
from types import ModuleType

import click

import gdrkit
from gdrkit import errors
from gdrkit.exit_code import ExitCode

__all__ = [
    "API_FOLDER",
    "list_commands",
    "list_public_modules",
    "make_api_pages",
    "make_commands_page",
    "make_errors_page",
    "read_reason_meanings",
]

API_FOLDER = "docs/reference/api"
# Modules inside packages that the reference also describes, because guides import from them.
_FURTHER_MODULES = (
    "gdrkit.cufile.parameters",
    "gdrkit.harness.needs.cuda",
    "gdrkit.harness.needs.cufile",
    "gdrkit.harness.needs.gaudi",
    "gdrkit.harness.needs.host",
    "gdrkit.harness.needs.verbs",
    "gdrkit.registration.gdr_handle",
    "gdrkit.storage.client",
    "gdrkit.storage.file",
)
# Longest text of a constant in the reference.
_VALUE_CHARACTERS_MAX = 200
# A documented member of Reason in the source of gdrkit.errors.
_REASON = re.compile(r'^    #: (?P<meaning>.+)\n    [A-Z_]+ = "(?P<value>\w+)"$', re.MULTILINE)


@functools.cache
def list_public_modules() -> dict[str, ModuleType]:
    """Return the modules with public names: packages, modules directly in gdrkit, and modules that guides import from.

    The modules of the command line are left out, because people use their commands and not their functions.
    """
    names = [
        module.name
        for module in pkgutil.walk_packages(gdrkit.__path__, "gdrkit.")
        if module.ispkg or (module.name.count(".") == 1 and not re.match(r"gdrkit\.(_|cli)", module.name))
    ]
    modules = {name: importlib.import_module(name) for name in ["gdrkit", *names, *_FURTHER_MODULES]}
    return {name: module for name, module in sorted(modules.items()) if module.__all__}


def make_api_pages(links_by_name: dict[str, list[str]]) -> dict[str, str]:
    """Return the Markdown of the reference of the Python interface by the path of each page.

    `links_by_name` has, for the full name of an object, links to programs that use it.
    """
    pages, page_by_object = {}, dict[int, str]()
    modules = list_public_modules()
    for module_name, module in modules.items():
        parts = [f"# {module_name}\n", _make_directive("automodule", module_name, "no-members")]
        for name in module.__all__:
            public_object, full_name = getattr(module, name), f"{module_name}.{name}"
            parts.append(f"## {name}\n")
            if inspect.ismodule(public_object):
                parts.append(f"The module [{public_object.__name__}]({public_object.__name__}.md).\n")
            elif id(public_object) in page_by_object and (
                inspect.isclass(public_object) or inspect.isfunction(public_object)
            ):
                parts.append(f"The same as {{py:obj}}`{page_by_object[id(public_object)]}`.\n")
            else:
                page_by_object[id(public_object)] = full_name
                parts.append(_make_directive(*_make_object_directive(full_name, public_object)))
            links = links_by_name.get(full_name, [])
            if links:
                parts.append(f"Used in {', '.join(links)}.\n")
        pages[f"{API_FOLDER}/{module_name}.md"] = "\n".join(parts)
    toctree_entries = "\n".join(f"{name}" for name in modules)
    rows = [f"| [{name}]({name}.md) | {_take_first_paragraph(module)} |" for name, module in modules.items()]
    table = "\n".join(["| module | contents |", "|---|---|", *rows])
    toctree = f"```{{toctree}}\n:hidden:\n\n{toctree_entries}\n```\n"
    names_count = sum(len(module.__all__) for module in modules.values())
    introduction = (
        f"The reference has {names_count} public names in {len(modules)} modules: all names in their `__all__`."
    )
    pages[f"{API_FOLDER}/README.md"] = f"# Python interface\n\n{introduction}\n\n{table}\n\n{toctree}"
    return pages


def _make_object_directive(full_name: str, public_object: object) -> tuple[str, ...]:
    """Return the name, the argument and the options of the Sphinx directive that documents an object."""
    if inspect.isclass(public_object):
        is_enum = issubclass(public_object, enum.Enum)
        return ("autoclass", full_name, "members", "show-inheritance", *(["undoc-members"] if is_enum else []))
    # A constant gets the directive py:data, because autodoc would describe it by the docstring of its type.
    return (
        ("autofunction", full_name)
        if callable(public_object)
        else ("py:data", full_name, f"value: {_shorten_repr(public_object)}")
    )


def _shorten_repr(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]} ..."


def _make_directive(name: str, argument: str, *options: str) -> str:
    lines = [f".. {name}:: {argument}", *(f"   :{option}:" for option in options)]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])


def _take_first_paragraph(documented_object: object) -> str:
    """Return the first paragraph of a docstring for the cell of a table."""
    text = " ".join((inspect.getdoc(documented_object) or "").split("\n\n")[0].split()).replace("|", "\\|")
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").removesuffix("::")


def list_commands(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """Return the full name of a command and of its subcommands, each with its help text."""
    help_texts = [(context.command_path, command.get_help(context))]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            if subcommand is not None and not subcommand.hidden:
                help_texts += list_commands(subcommand, _make_context(subcommand, name, parent=context))
    return help_texts


def _make_context(command: click.Command, name: str, *, parent: click.Context | None = None) -> click.Context:
    """Return the context in which click makes the help text of a command, 100 columns wide."""
    return click.Context(command, info_name=name, parent=parent, terminal_width=100, **command.context_settings)


def make_commands_page() -> str:
    """Return the page of all commands. ``--help`` prints the same texts."""
    # The group is not a public name of gdrkit.cli, so it is read from the imported module.
    group: click.Group = importlib.import_module("gdrkit.cli").cli
    parts = ["# Commands\n", "This page has the help text of every command: `gdrkit COMMAND --help` prints the same.\n"]
    for name, help_text in list_commands(group, _make_context(group, "gdrkit")):
        parts.append(f"## {name}\n\n```text\n{help_text.rstrip()}\n```\n")
    return "\n".join(parts)


def read_reason_meanings() -> dict[errors.Reason, str]:
    """Return the meaning of each reason, from the comment above its definition."""
    source = inspect.getsource(errors)
    meanings = {match["value"]: match["meaning"] for match in _REASON.finditer(source)}
    return {reason: meanings.get(reason.value, "") for reason in errors.Reason}


def make_errors_page() -> str:
    """Return the page of exceptions, reasons and exit codes."""
    public_objects = [getattr(errors, name) for name in errors.__all__]
    classes = [value for value in public_objects if inspect.isclass(value) and issubclass(value, errors.GdrkitError)]
    parts = [
        "# Errors and exit codes\n",
        (
            "Every error that gdrkit raises on purpose is a `GdrkitError`. Programs compare its `reason`, never its "
            "text. `what_to_do` says what to do. An `ApiError` also has the `api`, the failed call (`operation`), its "
            "arguments, and the number that the API returned (`status`). If the number is an errno, the error is also "
            "the built-in exception of that errno: `except FileNotFoundError` catches an ENOENT.\n"
        ),
        "## Exit codes of the commands\n",
        "| code | name | meaning for `gdrkit qualify` and `gdrkit check` |\n|---|---|---|",
        "\n".join(f"| {int(code)} | `{code.name}` | {code.meaning} |" for code in ExitCode) + "\n",
        (
            "The other commands end with the same codes: 0 if they did what was asked, 2 for wrong usage, 3 if set-up "
            "is missing, 1 for any other error. `gdrkit run` ends with the exit code of its command, or with one of "
            "the codes that [its help text](commands.md) lists.\n"
        ),
        "## Exceptions\n",
        "| class | base | when | exit code |\n|---|---|---|---|",
        "\n".join(_make_exception_row(value) for value in classes) + "\n",
        "## Reasons\n",
        "| `reason` | meaning |\n|---|---|",
        "\n".join(f"| `Reason.{reason.name}` | {meaning} |" for reason, meaning in read_reason_meanings().items())
        + "\n",
    ]
    return "\n".join(parts)


def _make_exception_row(error_class: type[errors.GdrkitError]) -> str:
    # ExitCode.of reads only the class of the error, so the error is made without its arguments.
    code = ExitCode.of(BaseException.__new__(error_class))
    link = f"[{error_class.__name__}](api/gdrkit.errors.md#{error_class.__name__.lower()})"
    return f"| {link} | `{error_class.__mro__[1].__name__}` | {_take_first_paragraph(error_class)} | {int(code)} |"
