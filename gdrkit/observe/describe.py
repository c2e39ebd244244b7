"""The result of `gdrkit observe` as text for a terminal, and as an HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.report.render import make_template_environment
from gdrkit.text import escape_controls
from gdrkit.units import rounded_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.observe.observation import Observation, ObservedProcess, ObservedRoute

__all__ = ["describe_observation", "render_page"]


def describe_observation(observation: Observation) -> str:
    """Return the observation as text: route outcomes with evidence, libraries, dma-bufs, and facts not observed."""
    return escape_controls("\n".join(_describe_lines(observation)))


def render_page(observation: Observation) -> str:
    """Return the observation as a self-contained HTML page."""
    template_variables = {
        "title": " ".join(observation.command),
        "observation": observation,
        "route_outcomes": [_describe_route_and_outcome(route) for route in observation.routes],
    }
    return make_template_environment(escaped=True).get_template("observation.html.j2").render(template_variables)


def _describe_lines(observation: Observation) -> Iterator[str]:
    for route in observation.routes:
        yield _describe_route_and_outcome(route)
        if route.cause:
            yield f"  because {route.cause}"
        for sentence in route.evidence:
            yield f"  {sentence}"
    for process in observation.processes:
        yield from _list_libraries_and_dmabufs(process)
    for sentence in observation.not_seen:
        yield f"not seen: {sentence}"


def _describe_route_and_outcome(route: ObservedRoute) -> str:
    moved_text = "" if not route.moved_bytes else f", {rounded_bytes(route.moved_bytes)}"
    return f"{route.route}: {route.outcome.value.replace('_', ' ')}{moved_text}"


def _list_libraries_and_dmabufs(process: ObservedProcess) -> Iterator[str]:
    process_text = f"{process.program} (pid {process.process_id})"
    for library in process.libraries:
        twin_text = " (software twin)" if library.is_twin else ""
        yield f"library: {process_text}: {library.name}{twin_text}, {library.path}"
    for dmabuf in process.dmabufs:
        yield f"dma-buf: {process_text}: {rounded_bytes(dmabuf.size_bytes)}, exported by {dmabuf.exporter}"
