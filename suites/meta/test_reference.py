"""The pages that the site makes from the code are complete, and the documents have a place on the site."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from automation.site import flowchart, reference, stage
from automation.site.examples import list_all_programs, map_names_to_programs
from automation.site.snippets import ROOT, list_guides
from gdrkit import errors
from gdrkit.cufile import Cause
from gdrkit.inventory import RULES

# The Markdown of each page of the Python interface, by the path of the page.
API_PAGES = reference.make_api_pages({})
# The public names that have no example, each with the reason.
NAMES_WITHOUT_EXAMPLE: dict[str, str] = tomllib.loads((Path(__file__).parent / "without_example.toml").read_text())


def list_declared_names() -> set[str]:
    """Return the full names in the `__all__` of each package and of each module directly in gdrkit/."""
    public_names = set()
    for path in sorted((ROOT / "gdrkit").rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        is_private = re.search(r"\._|\.cli", module)
        if is_private or not (path.name == "__init__.py" or path.parent == ROOT / "gdrkit"):
            continue
        for node in ast.parse(path.read_text()).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(node, ast.Assign | ast.AnnAssign):
                assert node.value is not None
                public_names |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}
    return public_names


def test_reference_has_every_public_name() -> None:
    headings = {
        f"{Path(page).stem}.{name}"
        for page, page_text in API_PAGES.items()
        for name in re.findall(r"^## (\w+)$", page_text, re.MULTILINE)
    }
    declared_names = list_declared_names()
    assert len(declared_names) > 450
    assert declared_names - headings == set()


def test_public_class_or_function_has_a_docstring() -> None:
    # The two native classes have no docstrings. The protocols Iovec and Ioring in gdrkit.usrbio.native_types document
    # their interfaces.
    undocumented = [
        f"{module_name}.{name}"
        for module_name, module in reference.list_public_modules().items()
        for name in module.__all__
        if (inspect.isclass(public_object := getattr(module, name)) or inspect.isfunction(public_object))
        and not public_object.__doc__
    ]
    assert undocumented == ["gdrkit.usrbio.ioring", "gdrkit.usrbio.iovec"]


def needs_an_example(public_object: object) -> bool:
    """Return whether programs call this object. They do not call results, enumerations, protocols and errors."""
    if not inspect.isclass(public_object):
        return inspect.isroutine(public_object)
    is_value = dataclasses.is_dataclass(public_object) or issubclass(public_object, tuple | enum.Enum | BaseException)
    return not (is_value or getattr(public_object, "_is_protocol", False))


def test_name_that_programs_call_has_an_example() -> None:
    programs_by_name = map_names_to_programs(list_all_programs())
    names_without_example = {
        f"{module_name}.{name}"
        for module_name, module in reference.list_public_modules().items()
        for name in module.__all__
        if needs_an_example(getattr(module, name)) and not programs_by_name[f"{module_name}.{name}"]
    }
    assert names_without_example == set(NAMES_WITHOUT_EXAMPLE)


@pytest.mark.parametrize("command_name", ["gdrkit qualify", "gdrkit tiers migrate"])
def test_page_of_commands_has_the_printed_help(command_name: str) -> None:
    command = [sys.executable, "-m", *command_name.split(), "--help"]
    printed_help = subprocess.run(
        command, env={"COLUMNS": "100", "PATH": "/usr/bin"}, capture_output=True, text=True, check=True
    ).stdout
    section = re.search(
        rf"^## {command_name}\n\n```text\n(.*?)\n```$", reference.make_commands_page(), re.MULTILINE | re.DOTALL
    )
    assert section is not None
    # The texts differ in the name of the program, and may differ in line breaks.
    assert "".join(section[1].split()) == "".join(printed_help.replace("python -m gdrkit", "gdrkit").split())


def test_page_of_errors_has_every_class_and_reason() -> None:
    page = reference.make_errors_page()
    class_names = [name for name in errors.__all__ if name not in {"Api", "Reason", "errno_name", "GdrkitWarning"}]
    assert [name for name in class_names if f"[{name}](" not in page] == []
    assert [reason.name for reason, meaning in reference.read_reason_meanings().items() if not meaning] == []


def test_every_guide_is_in_the_navigation() -> None:
    listed_pages = {name for names in stage.read_navigation().values() for name in names}
    documents = {path.relative_to(ROOT).as_posix() for path in list_guides() if path.parent == ROOT / "docs"}
    documents |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "tutorial").glob("*.md")}
    assert documents - {"docs/README.md"} - listed_pages == set()
    assert [name for name in listed_pages if not (ROOT / name).is_file() and "/reference/" not in name] == []


def test_link_of_a_document_leads_to_a_file() -> None:
    assert stage.find_dead_links() == []


def test_external_links_are_valid_addresses() -> None:
    assert stage.check_external_links() == []


@pytest.mark.parametrize("link", ["http://example.com/", "https://localhost/x", "ftp://example.com/x"])
def test_invalid_external_link_is_found(link: str) -> None:
    assert list(stage.find_invalid_links(f"See [this]({link}).")) == [link]


def test_flowchart_of_the_architecture_is_drawn() -> None:
    document_text = (ROOT / "docs" / "architecture.md").read_text()
    chart = flowchart.parse(document_text)
    assert "cuda" in chart.rows["level 2"]
    assert ("registration", "cuda") in chart.edges
    picture = flowchart.draw(chart)
    assert picture.count("marker-end") == len(chart.edges)
    assert "\n\n" not in picture  # An empty line would end the HTML block.


def test_flowchart_with_an_unknown_node_is_refused() -> None:
    with pytest.raises(ValueError, match="gone"):
        flowchart.parse('subgraph a["a"]\n  b\nend\nb --> gone')


def test_troubleshooting_has_every_cause_of_the_doctor() -> None:
    document_text = (ROOT / "docs" / "troubleshooting.md").read_text()
    documented_codes = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", document_text))
    assert {rule.code for rule in RULES} - documented_codes == set()


def test_cufile_document_has_every_cause() -> None:
    document_text = (ROOT / "docs" / "cufile.md").read_text()
    assert [cause.value for cause in Cause if f"| `{cause.value}` |" not in document_text] == []
