"""A case runs every block of code in the documents, or snippets.toml says what else runs it, or why nothing runs it."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from automation.site.snippets import ROOT, Snippet, find_snippets, find_used_names, list_guides
from gdrkit.inventory import load_profile
from gdrkit.launch import APIS_WITH_TWINS, Launch, environment

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

# The third chapter of the tutorial runs two qualifications, a check and the doctor, which takes minutes.
pytestmark = pytest.mark.timeout(600)
# For each document: the beginning of each block of code, and how the block is checked.
CHECKS_BY_DOCUMENT: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "snippets.toml").read_text())
SNIPPETS = [snippet for path in list_guides() for snippet in find_snippets(path)]
CHAPTERS = sorted({snippet.document for snippet in SNIPPETS if "/tutorial/" in snippet.document})
# A command that begins with one of these texts is a service. It runs until it is terminated.
SERVICE_COMMANDS = ("gdrkit serve", "gdrkit agent", "gdrkit tiers run")
# These commands may end with other exit codes than 0, because they report problems of this machine or get errors from a
# fault plan.
EXIT_CODES_BY_COMMAND = {"gdrkit doctor": {0, 1, 4}, "gdrkit run --software --isolated --faults": {1}}
# Values for the placeholders of the documents.
PLACEHOLDER_VALUES = {
    "CODE": "memlock-low",
    "HOST:PORT": "127.0.0.1:0",
    ":7070": ":0",
    "=/mnt/fast": "=fast",
    "=/mnt/ssd": "=medium",
}
PLACEHOLDER_VALUES |= {"=/data": "=slow", "~/.config/fish/completions/": ""}
# At least two spaces separate a comment from the command before it.
TRAILING_COMMENT = re.compile(r" {2,}(?:#.*|(?![-|]).*)$")

# Programs around a block of code that is only a part of a program. In FRAME_BY_DOCUMENT, the block replaces BODY. In
# SHARING_FRAME, parts of the block of docs/sharing.md replace IMPORTS, OWNER and PEER.
SHARING_FRAME = """
import os, socket, sys
from gdrkit import cuda, verbs
IMPORTS
connection, peer_connection = socket.socketpair()
kind = sys.argv[1]
if os.fork():
    with cuda.Device(0) as device, device.allocate(1 << 20) as memory:
OWNER
        assert os.wait()[1] == 0
else:
    connection = peer_connection
    (nic,) = verbs.open_active_nics(count_max=1)
PEER
    os._exit(0)
"""
FRAME_BY_DOCUMENT = {
    "docs/add-a-device.md": """
from gdrkit import cuda, verbs
from gdrkit.registration import RegionCache
offset, length = 0, 65536
(nic,) = verbs.open_active_nics(count_max=1)
with cuda.Device(0) as device, device.allocate(65536) as owned, owned.export_dmabuf() as exported:
    fd = exported.fd
    with nic, RegionCache([nic]) as cache:
BODY
        assert remote.length_bytes == length
""",
    "docs/registration.md": """
from gdrkit import verbs
nics = verbs.open_active_nics()
if True:
    if True:
BODY
        for nic in nics:
            nic.close()
""",
}


def find_entry(snippet: Snippet) -> str:
    """Return how a block of code is checked: its entry in snippets.toml."""
    entries = [
        entry
        for block_start, entry in CHECKS_BY_DOCUMENT.get(snippet.document, {}).items()
        if snippet.text.startswith(block_start)
    ]
    assert len(entries) == 1, f"suites/meta/snippets.toml has {len(entries)} entries for {snippet}"
    return entries[0]


def select_snippets(entry: str) -> list[Snippet]:
    """Return the blocks of code with this entry in snippets.toml."""
    return [snippet for snippet in SNIPPETS if find_entry(snippet) == entry]


def make_twin_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a command on software twins that can reach only the twins of this case."""
    environ = environment(Launch(twin_apis=APIS_WITH_TWINS, isolated=True))
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    tier_variables = {
        "GDRKIT_TIERS": "nvme=fast ssd=medium hdd=slow",
        "GDRKIT_TIERS_CATALOGUE": str(folder / "catalogue"),
    }
    return environ | tier_variables | {"HOME": str(folder)}


def run_command(command_line: str, folder: Path, environ: dict[str, str]) -> str:
    """Run one command by a shell, and return its output. A service is terminated after its first line."""
    if command_line.startswith(SERVICE_COMMANDS):
        with subprocess.Popen(
            ["bash", "-c", f"exec {command_line}"], cwd=folder, env=environ, stdout=subprocess.PIPE
        ) as service:
            assert service.stdout is not None
            first_line = service.stdout.readline()
            service.terminate()
            service.stdout.read()
            assert service.wait(30) == 0, command_line
        return first_line.decode()
    result = subprocess.run(
        ["bash", "-c", command_line], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    allowed_codes = next(
        (allowed_codes for command, allowed_codes in EXIT_CODES_BY_COMMAND.items() if command_line.startswith(command)),
        {0},
    )
    assert result.returncode in allowed_codes, f"{command_line}\n{result.stdout}{result.stderr}"
    return result.stdout


def create_named_files(folder: Path) -> None:
    """Create the files and folders that the commands of the documents name."""
    (folder / "SRC").write_bytes(os.urandom(100_000))
    for name in ("DIR", "fast", "medium", "slow", "reports/runs"):
        (folder / name).mkdir(parents=True)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small qualification on the twins."""
    folder = tmp_path_factory.mktemp("run")
    options = ["--software", "-k", "policy", "--output", str(folder / "report")]
    subprocess.run([sys.executable, "-m", "gdrkit", "qualify", *options], check=True, capture_output=True, timeout=200)
    return folder / "report"


def test_every_snippet_is_in_the_table(evidence: Evidence) -> None:
    entry_kinds = [find_entry(snippet).split()[0] for snippet in SNIPPETS]
    count_by_kind = {kind: entry_kinds.count(kind) for kind in sorted(set(entry_kinds))}
    evidence["snippets"] = {"total": len(SNIPPETS), **count_by_kind}
    print(f"{len(SNIPPETS)} blocks of code: {count_by_kind}")  # noqa: T201 - `pytest -rP` shows the count
    assert set(entry_kinds) <= {"run", "program", "tutorial", "by", "session", "not"}


def test_table_has_no_entry_without_a_snippet() -> None:
    used_entries = {
        (snippet.document, block_start)
        for snippet in SNIPPETS
        for block_start in CHECKS_BY_DOCUMENT[snippet.document]
        if snippet.text.startswith(block_start)
    }
    assert {
        (document, block_start) for document, block_starts in CHECKS_BY_DOCUMENT.items() for block_start in block_starts
    } == used_entries


def test_named_case_exists() -> None:
    for entry in {find_entry(snippet) for snippet in SNIPPETS}:
        kind, _, reference = entry.partition(" ")
        if kind == "by":
            case_file, _, case_name = reference.partition("::")
            assert f"def {case_name}" in (ROOT / case_file).read_text(), entry


def test_named_session_exists() -> None:
    defined_sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    named_sessions = {
        find_entry(snippet).split()[1] for snippet in SNIPPETS if find_entry(snippet).startswith("session ")
    }
    for path in list_guides():
        named_sessions |= set(re.findall(r"nox -s (\w+)", path.read_text()))
    assert named_sessions <= defined_sessions


def parse_commands(snippet: Snippet) -> list[str]:
    """Return the command of each line, without comments and with values for the placeholders."""
    commands = []
    for line in snippet.text.splitlines():
        command = TRAILING_COMMENT.sub("", line)
        for placeholder, value in PLACEHOLDER_VALUES.items():
            command = command.replace(placeholder, value)
        commands.append(command)
    return commands


@pytest.mark.parametrize("snippet", select_snippets("run"), ids=str)
def test_commands_of_the_document_run(snippet: Snippet, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    create_named_files(tmp_path)
    if snippet.document == "docs/report.md":
        report_folder = request.getfixturevalue("run_folder")
        for name in ("DIR/node1",) if "--fleet" in snippet.text else ("DIR", "BEFORE", "AFTER"):
            shutil.copytree(report_folder, tmp_path / name, dirs_exist_ok=True)
        shutil.copyfile(report_folder / "records.jsonl", tmp_path / "FILE.jsonl")
    environ = make_twin_environment(tmp_path)
    for command in parse_commands(snippet):
        run_command(command, tmp_path, environ)


def insert_into_frames(snippet: Snippet) -> list[tuple[str, str]]:
    """Return the complete programs that contain the block of code, each with its argument."""
    if snippet.document != "docs/sharing.md":
        frame = FRAME_BY_DOCUMENT[snippet.document]
        return [(frame.replace("BODY", indent(snippet.text, 8)), "")]
    import_code, owner_code, importer_code, agent_code = re.split(
        r"^# (?:the owner|the other process|an agent with a NIC)$", snippet.text, flags=re.MULTILINE
    )
    frame = SHARING_FRAME.replace("IMPORTS", import_code)
    return [
        (frame.replace("OWNER", indent(owner_code, 8)).replace("PEER", indent(importer_code, 4)), "IPC"),
        (
            frame.replace("OWNER", indent(owner_code.replace("ShareKind.IPC", "ShareKind.DMABUF"), 8)).replace(
                "PEER", indent(agent_code, 4)
            ),
            "DMABUF",
        ),
    ]


def indent(text: str, width: int) -> str:
    return "\n".join(" " * width + line for line in text.strip("\n").splitlines())


@pytest.mark.parametrize("snippet", select_snippets("program"), ids=str)
def test_part_of_a_program_runs(snippet: Snippet, tmp_path: Path) -> None:
    for program, argument in insert_into_frames(snippet):
        (tmp_path / "program.py").write_text(program)
        run_command(f"{sys.executable} program.py {argument}", tmp_path, make_twin_environment(tmp_path))


@pytest.mark.parametrize("document", CHAPTERS)
def test_chapter_of_the_tutorial_works(document: str, tmp_path: Path) -> None:
    """Run the programs and commands of a chapter in order. A block of text must be the end of the last output."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    file_names = iter(re.findall(r"\bIn `([\w.]+)`:", (ROOT / document).read_text()))
    output = ""
    for snippet in find_snippets(ROOT / document):
        if find_entry(snippet) != "tutorial":
            continue
        if snippet.language == "python" or snippet.text.startswith("gdrkit-faults"):
            (tmp_path / next(file_names)).write_text(snippet.text)
        elif snippet.language == "text":
            expected_lines = snippet.text.splitlines()
            assert remove_numbers(expected_lines) == remove_numbers(output.splitlines()[-len(expected_lines) :])
        else:
            for line in snippet.text.splitlines():
                output = run_command(line, tmp_path, environ)


def remove_numbers(lines: list[str]) -> list[str]:
    """Return the lines with each number replaced by 0. The numbers differ between machines."""
    return [re.sub(r"\d+", "0", line) for line in lines]


def test_expectation_of_the_document_is_valid(tmp_path: Path) -> None:
    (expectation,) = (snippet.text for snippet in SNIPPETS if snippet.text.startswith("[[expected]]"))
    profile = 'schema_version = 1\nname = "example"\nabout = "an example"\n'
    (tmp_path / "example.toml").write_text(profile + expectation)
    (expected,) = load_profile("example", folder=tmp_path).expected
    assert (expected.value, expected.tolerance_percent) == (55.3, 10)


@pytest.mark.parametrize("snippet", [snippet for snippet in SNIPPETS if snippet.language == "python"], ids=str)
def test_program_of_the_document_uses_names_that_exist(snippet: Snippet) -> None:
    """A program compiles and uses only names that exist, even if no case can run it."""
    ast.parse(snippet.text)
    for name in find_used_names(snippet.text):
        name_parts = name.split(".")
        resolved_object: object = importlib.import_module(name_parts[0])
        for index, name_part in enumerate(name_parts[1:], start=2):
            if not hasattr(resolved_object, name_part):
                importlib.import_module(".".join(name_parts[:index]))
            resolved_object = getattr(resolved_object, name_part)
            if isinstance(resolved_object, type):
                break
