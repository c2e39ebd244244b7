"""Hand-written mutants: patches of Python files and of native code.

``meta.mutants.run`` adds the patches to its random sample. A patch replaces a text that must occur exactly once in its
file. If the text occurs more often, ``search_from`` names a text before the occurrence to replace. A patch that no
longer fits ends the run with an error, so that the patch is adapted together with the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meta.mutants.modules import CASES_BY_FILE
from meta.mutants.mutant import Mutant, PatchMismatch, find_changed_lines

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PATCHES", "Patch", "apply_patch", "make_mutant"]

# Arguments of pytest for the mutants of the storage service, of the agent and of the copy engine.
_STORAGE = ("suites/storage", "-k", "not fuzzer")
_AGENT = (
    "suites/usrbio/test_agent_loop.py",
    "suites/usrbio/test_agent.py",
    "suites/usrbio/test_bad_input.py",
    "suites/usrbio/test_end_to_end.py",
    "-k",
    "not fuzzer and not 1GiB and not 64MiB and not 64_rings and not side_by_side",
)
_COPY_ENGINE = ("suites/gds/test_unruly_files.py", "suites/gds/test_reads_and_writes.py", "suites/gds/test_copy.py")


@dataclass(frozen=True, slots=True)
class Patch:
    """A hand-written change of one file.

    Attributes
    ----------
    name : str
        Name of the mutant: the defect that the patch introduces, in a few words.
    file : str
        Path below the root of the tree.
    before, after : str
        The text to replace, and its replacement.
    search_from : str
        A text of the file, at which the search for `before` begins. If empty, the search begins at the start of the
        file.
    cases : tuple of str
        The arguments of pytest that choose the cases. If empty, the entry of the file in modules.CASES_BY_FILE.
    """

    name: str
    file: str
    before: str
    after: str
    search_from: str = ""
    cases: tuple[str, ...] = ()


PATCHES: tuple[Patch, ...] = (
    # ------------------------------ mutants by an external reviewer. At the time of the review, no case detected them.
    Patch(
        "serve-takes-every-user",
        "gdrkit/storage/listener.py",
        "if user not in {0, os.geteuid()}:",
        "if False:",
    ),
    Patch(
        "agent-folder-visible-to-clients",
        "gdrkit/storage/store.py",
        'frozenset({b".gdrkit", b"3fs-virt"})',
        'frozenset({b".gdrkit"})',
    ),
    Patch(
        "write-only-descriptor-adopted-for-reading",
        "gdrkit/storage/store.py",
        "(read and access == os.O_WRONLY) or ",
        "",
    ),
    Patch(
        "control-write-by-read-only-handle",
        "gdrkit/storage/requests.py",
        "if not file.may_write:",
        "if False:",
    ),
    Patch(
        "data-write-by-read-only-handle",
        "native/storage/session.cpp",
        "!(is_write ? file->may_write : file->may_read)",
        "(!is_write && !file->may_read)",
        cases=_STORAGE,
    ),
    Patch(
        "ten-times-the-sessions",
        "gdrkit/storage/server.py",
        "SESSIONS_MAX = 64",
        "SESSIONS_MAX = 640",
    ),
    Patch(
        "sum-of-partly-written-chunk-kept",
        "native/storage/store_changes.cpp",
        "status == 0 || chunk_begin + chunk_bytes <= offset + written",
        "status == 0 || chunk_begin < offset + written",
        cases=_STORAGE,
    ),
    Patch(
        "published-memory-of-another-user",
        "gdrkit/usrbio/agent/shared_memory.py",
        "status.st_uid != uid",
        "False",
        search_from="def open_shared",
    ),
    Patch(
        "unnamed-memory-of-another-user",
        "gdrkit/usrbio/agent/shared_memory.py",
        "status.st_uid != uid",
        "False",
        search_from="def adopt_unnamed",
    ),
    Patch(
        "no-last-look-at-the-copy-before-the-old-file-goes",
        "gdrkit/tiers/migration.py",
        "        self._check_copy_has_name()\n",
        "",
        search_from="def _remove",
    ),
    Patch(
        "no-last-look-for-writers-before-the-old-file-goes",
        "gdrkit/tiers/migration.py",
        "        self._guard.check()\n",
        "",
        search_from="def _remove",
    ),
    Patch(
        "source-folder-not-synced",
        "gdrkit/tiers/migration.py",
        "self._run_step(Phase.RETIRED, self._sync_source)",
        "self._run_step(Phase.RETIRED, lambda: None)",
        cases=(*CASES_BY_FILE["gdrkit/tiers/migration.py"], "suites/tiers/test_power_cuts.py"),
    ),
    Patch(
        "copy-sync-ignored-by-the-command",
        "gdrkit/cli_files.py",
        "durable=sync,",
        "durable=False,",
        cases=("suites/gds/test_copy.py", "suites/gds/test_copy_files.py"),
    ),
    Patch(
        "copy-sync-does-nothing",
        "gdrkit/gds/new_file.py",
        "if durable:",
        "if False:",
    ),
    Patch(
        "copy-sync-leaves-the-folder-out",
        "gdrkit/gds/new_file.py",
        "_open_folder_to_sync(destination, stack) if durable else None",
        "None",
    ),
    Patch(
        "quote-in-a-metric-label",
        "gdrkit/report/metrics.py",
        """.replace('"', '\\\\"')""",
        "",
        cases=("suites/report",),
    ),
    Patch(
        "number-of-64-bits-in-a-request",
        "gdrkit/storage/control.py",
        "_NUMBER_MAX = (1 << 63) - 1",
        "_NUMBER_MAX = 1 << 63",
    ),
    # ------------------------------------------------------------------------------------------- the storage service
    Patch(
        "wrong-checksum-of-a-write-accepted",
        "native/storage/segments.cpp",
        "segment_checksum != operation.checksum",
        "false",
        cases=_STORAGE,
    ),
    Patch(
        "checksum-of-the-last-segment-alone",
        "native/storage/segments.cpp",
        "segment.begin == 0 ? segment_checksum : crc32c_combine(pending.checksum, segment_checksum, read_bytes)",
        "segment_checksum",
        cases=_STORAGE,
    ),
    Patch(
        "change-from-outside-unnoticed",
        "native/storage/store_file.cpp",
        "if (!(sums_.version() == current_version)) {",
        "if (false) {",
        cases=_STORAGE,
    ),
    Patch(
        "sum-kept-behind-a-new-end",
        "native/storage/store_changes.cpp",
        "sums_.discard_from(tail_chunk + (tail_bytes != 0 ? 1 : 0));",
        "sums_.discard_from(tail_chunk + 1);",
        cases=_STORAGE,
    ),
    Patch(
        "sums-of-another-file-with-the-same-inode",
        "native/storage/sums.cpp",
        "!(header_->identity == identity)",
        "false",
        cases=_STORAGE,
    ),
    Patch(
        "remote-address-may-overflow",
        "native/storage/session.cpp",
        " || operation.remote_address > UINT64_MAX - operation.length",
        "",
        cases=_STORAGE,
    ),
    Patch(
        "frame-may-have-another-version",
        "native/storage/parser.cpp",
        " || header.version != frame_version",
        "",
        cases=("suites/storage/test_foreign_bytes.py", "suites/storage/test_wire.py", "-k", "not fuzzer"),
    ),
    # ----------------------------------------------------------------------------------------------- the copy engine
    Patch(
        "short-read-counted-as-whole",
        "native/engine/job.cpp",
        "part.extent_offset + part.done_bytes);",
        "part.extent_offset + part.length);",
        cases=_COPY_ENGINE,
    ),
    Patch(
        "durable-without-fdatasync",
        "native/engine/job.cpp",
        "fdatasync(file->buffered_fd()) != 0",
        "file->buffered_fd() < -1",
        cases=("suites/gds/test_durable_write.py",),
    ),
    # ------------------------------------------------------------------------------------------------------ the agent
    Patch(
        "operation-beyond-its-buffer",
        "native/usrbio/agent/loop_io.cpp",
        " ||\n        arguments.length > spec.length - arguments.buffer_offset",
        "",
        cases=_AGENT,
    ),
    Patch(
        "ring-writes-a-read-only-file",
        "native/usrbio/agent/loop_io.cpp",
        "!(ring.spec.for_read ? file->spec.readable : file->spec.writable)",
        "ring.spec.for_read && !file->spec.readable",
        cases=_AGENT,
    ),
    Patch(
        "operation-crosses-a-block",
        "native/usrbio/agent/loop_io.cpp",
        "spec.block_bytes != 0 &&",
        "false &&",
        cases=_AGENT,
    ),
    Patch(
        "result-larger-than-asked",
        "native/usrbio/agent/loop_io.cpp",
        "(result > 0 && static_cast<std::uint64_t>(result) > operation.length)",
        "false",
        cases=_AGENT,
    ),
    Patch(
        "silent-server-awaited-for-ever",
        "native/usrbio/agent/loop_io.cpp",
        "now - silence_start_time_ < options_.server_timeout",
        "now - silence_start_time_ < Clock::duration::max()",
        cases=("suites/usrbio/test_agent_deaths.py",),
    ),
    Patch(
        "submission-head-may-go-backwards",
        "native/usrbio/ring/agent_side.cpp",
        "available + view_.distance(submission_tail_, next_to_claim_) >= view_.slot_count || available < due_count_",
        "false",
        cases=_AGENT,
    ),
    Patch(
        "completion-tail-may-go-backwards",
        "native/usrbio/ring/agent_side.cpp",
        "if (used_now > used_before) {",
        "if (used_now > used_before + view_.slot_count) {",
        cases=_AGENT,
    ),
)


def apply_patch(patch: Patch, root: Path) -> tuple[str, str]:
    """Return the text of the patched file in the tree at `root`, without and with the patch.

    Raises
    ------
    PatchMismatch
        `before` does not occur exactly once in the file. With `search_from`, it may occur several times, and the first
        occurrence after `search_from` is replaced; it is an error if there is none.
    """
    path = root / patch.file
    original_source = path.read_text() if path.is_file() else ""
    search_start = original_source.find(patch.search_from)
    text_before_search, searched_text = original_source[: max(search_start, 0)], original_source[max(search_start, 0) :]
    occurrence_count = searched_text.count(patch.before)
    if search_start < 0 or (occurrence_count != 1 and not (patch.search_from and occurrence_count)):
        message = (
            f"patch {patch.name}: the text to replace occurs {occurrence_count} times in {patch.file}, not once; "
            "adapt the patch (in suites/meta/mutants/patches.py or suites/meta/defects) to the new code"
        )
        raise PatchMismatch(message)
    return original_source, text_before_search + searched_text.replace(patch.before, patch.after, 1)


def make_mutant(patch: Patch, root: Path) -> Mutant:
    """Return the mutant that a patch makes of the tree at `root`.

    Raises
    ------
    PatchMismatch
        The patch does not fit the file; see :func:`apply_patch`.
    """
    original_source, changed_source = apply_patch(patch, root)
    line_number, before, after = find_changed_lines(original_source, changed_source)
    path = root / patch.file
    module = "native" if patch.file.startswith("native/") else path.stem
    operator = f"patch {patch.name}"
    return Mutant(
        module,
        patch.file,
        line_number,
        operator,
        before,
        after,
        changed_source,
        patch.cases or CASES_BY_FILE[patch.file],
    )
