"""The report of ``gdrkit run``: for each API, which processes used its twin, and how much.

The report is printed at the end of the run, and can be written as JSON. A twin is a library that emulates the hardware
below an API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import Api
from gdrkit.text import format_count
from gdrkit.units import rounded_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.twin_run.loaded import RealLibrary
    from gdrkit.twin_run.usage import ProcessUse, RuntimeUse

__all__ = ["list_used_apis", "report_document", "report_lines"]

# The object that a program must create to use an API, in the singular and in the plural, and the text for a program
# that created no such object.
_OBJECT_NOUNS_BY_API = {
    Api.VERBS: ("queue pair", "queue pairs", "no queue pair reached the state RTR"),
    Api.CUDA: ("memory allocation", "memory allocations", "no memory allocation"),
    Api.CUFILE: ("registered file", "registered files", "no registered file"),
    Api.HLTHUNK: ("opened device", "opened devices", "no opened device"),
}
# Largest number of programs in a line, and of process IDs of one program.
_PROGRAMS_MAX, _PROCESS_IDS_MAX = 4, 4


def list_used_apis(uses: Iterable[ProcessUse]) -> frozenset[Api]:
    """Return the APIs of which a process created an object. A queue pair counts only if it reached the state RTR.

    A process that only queries devices does not use an API. UCX creates queue pairs for such queries, but does not
    connect them.
    """
    return frozenset(use.api for use in uses if use.objects_count > 0)


def report_lines(
    twin_apis: frozenset[Api],
    uses: Sequence[ProcessUse],
    real_libraries: Sequence[RealLibrary],
    runtime_uses: Sequence[RuntimeUse] = (),
) -> list[str]:
    """Return the lines of the report.

    There is one line for each API whose twin was opened, for each CUDA runtime whose twin was opened, and for each real
    library that was loaded instead of a twin. The last line lists the APIs whose twin was not opened.
    """
    lines = []
    unopened_apis = []
    for api in sorted(twin_apis, key=lambda api: api.value):
        uses_of_api = [use for use in uses if use.api is api]
        if uses_of_api:
            lines.append(_describe_use(api, uses_of_api))
        else:
            unopened_apis.append(api.value)
    for runtime_library in dict.fromkeys(use.library for use in runtime_uses):
        programs_text = _describe_programs(
            [(use.program, use.process_id) for use in runtime_uses if use.library == runtime_library]
        )
        lines.append(f"{Api.CUDA.value}: twin of {runtime_library} opened by {programs_text}")
    apis_and_paths = dict.fromkeys((library.api, library.path) for library in real_libraries)
    for api_name, path in apis_and_paths:
        libraries_at_path = [library for library in real_libraries if library.path == path]
        programs_text = _describe_programs([(library.program, library.process_id) for library in libraries_at_path])
        lines.append(f"{api_name}: {path}, not the twin, was loaded by {programs_text}")
    if unopened_apis:
        lines.append(f"not used: {', '.join(unopened_apis)}")
    return lines


def report_document(
    uses: Sequence[ProcessUse],
    real_libraries: Sequence[RealLibrary],
    runtime_uses: Sequence[RuntimeUse],
    *,
    exit_code: int,
) -> dict[str, object]:
    """Return the report as values for JSON.

    The report has the exit code, the processes of each API with their objects and bytes, the CUDA runtimes whose twins
    were opened, and the real libraries that were loaded.
    """
    apis: dict[str, object] = {}
    for api in sorted({use.api for use in uses}, key=lambda api: api.value):
        uses_of_api = [use for use in uses if use.api is api]
        apis[api.value] = {
            "objects_count": sum(use.objects_count for use in uses_of_api),
            "moved_bytes": sum(use.moved_bytes for use in uses_of_api),
            "processes": [
                {
                    "process_id": use.process_id,
                    "program": use.program,
                    "objects_count": use.objects_count,
                    "moved_bytes": use.moved_bytes,
                }
                for use in uses_of_api
            ],
        }
    libraries = [
        {"api": library.api, "path": library.path, "program": library.program, "process_id": library.process_id}
        for library in real_libraries
    ]
    cuda_runtimes = [
        {"library": use.library, "program": use.program, "process_id": use.process_id} for use in runtime_uses
    ]
    return {"exit_code": exit_code, "apis": apis, "cuda_runtimes": cuda_runtimes, "real_libraries": libraries}


def _describe_use(api: Api, uses: Sequence[ProcessUse]) -> str:
    programs_text = _describe_programs([(use.program, use.process_id) for use in uses])
    objects_count = sum(use.objects_count for use in uses)
    moved_bytes = sum(use.moved_bytes for use in uses)
    singular, plural, no_object = _OBJECT_NOUNS_BY_API[api]
    if objects_count == 0:
        return f"{api.value}: twin opened by {programs_text}, but not used: {no_object}"
    objects_text = format_count(objects_count, singular, plural)
    moved_text = f"; {rounded_bytes(moved_bytes)} moved" if moved_bytes else ""
    return f"{api.value}: twin opened by {programs_text}; {objects_text}{moved_text}"


def _describe_programs(processes: Sequence[tuple[str, int]]) -> str:
    """Return text such as ``ib_write_bw (pid 12, 13), python3 (pid 14)``."""
    process_ids_by_program: dict[str, list[int]] = {}
    for program, process_id in processes:
        process_ids_by_program.setdefault(program, []).append(process_id)
    program_texts = []
    for program, process_ids in list(process_ids_by_program.items())[:_PROGRAMS_MAX]:
        ids_text = ", ".join(map(str, process_ids[:_PROCESS_IDS_MAX]))
        unlisted_id_count = len(process_ids) - _PROCESS_IDS_MAX
        program_texts.append(
            f"{program} (pid {ids_text}{f' and {unlisted_id_count} more' if unlisted_id_count > 0 else ''})"
        )
    unlisted_program_count = len(process_ids_by_program) - _PROGRAMS_MAX
    more_text = f" and {format_count(unlisted_program_count, 'more program')}" if unlisted_program_count > 0 else ""
    return ", ".join(program_texts) + more_text
