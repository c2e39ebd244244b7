"""docs/architecture.md is up to date: its picture shows the imports between the packages of gdrkit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meta import architecture

if TYPE_CHECKING:
    from pathlib import Path


def test_architecture_picture_is_up_to_date() -> None:
    assert architecture.DOCUMENT.read_text() == architecture.render(), (
        "write docs/architecture.md again: PYTHONPATH=suites python -m meta.architecture > docs/architecture.md"
    )


def test_architecture_picture_follows_the_imports(tmp_path: Path) -> None:
    module_path = tmp_path / "gdrkit" / "gds" / "engine.py"
    module_path.parent.mkdir(parents=True)
    module_path.write_text("from gdrkit import cuda, registration\n")
    (tmp_path / "gdrkit" / "registration").mkdir()
    (tmp_path / "gdrkit" / "registration" / "policy.py").write_text("from gdrkit.cuda import device\n")
    # The edge from gds to cuda is omitted, because a longer path connects them.
    edges = [line.strip() for line in architecture.render(tmp_path).splitlines() if "-->" in line]
    assert edges == ["gds --> registration", "registration --> cuda"]
