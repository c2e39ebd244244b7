"""Fuzzing of parsers: inputs with random changes, then inputs of the coverage-guided fuzzer atheris if it is installed.

A fuzz module of the suites, such as ``property.fuzz_handles``, describes its parsers as :class:`FuzzTarget` and calls
:func:`main`. A case calls :func:`run_fuzzer`, which runs such a module in a child process. The child process is
necessary because atheris exits the process in which it runs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import itertools
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from support.python_child import module_command, suites_environ

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

__all__ = ["FuzzTarget", "generate_changed_inputs", "main", "require_round_trip", "run_fuzzer"]

# Extreme values of a 64-bit integer in eight bytes: -1 or the unsigned maximum, 0, and the most negative number.
_EXTREME_INTEGERS = (b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80")
# Time limit for the start and the exit of a child process. The duration of the fuzzing is added to the limit.
_START_AND_EXIT_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class FuzzTarget:
    """A parser and its valid inputs.

    Attributes
    ----------
    check_input : callable
        Function that parses an input. It returns if the parser returns a result or raises its documented error.
    valid_inputs : sequence of bytes
        Inputs that the parser accepts.
    instrumented_owners : sequence of modules and classes
        Modules and classes with the functions whose coverage atheris measures.
    change_count_range : tuple of int
        Minimum and maximum number of random changes of an input.
    alphabet : bytes
        Characters of a text format. A change may replace a byte by such a character.
    tokens : sequence of bytes
        Words of a text format. A change may insert such a word. A format without tokens is binary.
    length_max_bytes : int
        Length of the longest input that atheris generates, in bytes.
    """

    check_input: Callable[[bytes], None]
    valid_inputs: Sequence[bytes]
    instrumented_owners: Sequence[ModuleType | type]
    change_count_range: tuple[int, int] = (0, 4)
    alphabet: bytes = b""
    tokens: Sequence[bytes] = ()
    length_max_bytes: int = 1024

    def make_random_input(self, rng: random.Random) -> bytes:
        """Return a valid input with random changes."""
        data = bytearray(rng.choice(self.valid_inputs))
        change_functions = _TEXT_CHANGES if self.tokens else _BINARY_CHANGES
        if self.alphabet:
            change_functions = (*change_functions, _replace_by_alphabet_character)
        for _ in range(rng.randint(*self.change_count_range)):
            rng.choice(change_functions)(self, data, rng.randrange(len(data) + 1), rng)
        return bytes(data)


def generate_changed_inputs(target: FuzzTarget, seed: int, count: int | None = None) -> Iterator[bytes]:
    """Yield `count` valid inputs with random changes, or infinitely many if `count` is None."""
    rng = random.Random(seed)
    for _ in itertools.repeat(None) if count is None else range(count):
        yield target.make_random_input(rng)


def require_round_trip(parse_and_pack: Callable[[bytes], bytes], data: bytes) -> None:
    """Require that `parse_and_pack` returns `data` or raises UsageError(MALFORMED).

    The function parses its argument, packs the result into bytes, and returns the bytes.
    """
    try:
        repacked_data = parse_and_pack(data)
    except UsageError as error:
        if error.reason is not Reason.MALFORMED:
            raise
    else:
        if repacked_data != data:
            message = f"{data.hex()} is parsed and packed as {repacked_data.hex()}"
            raise AssertionError(message)


def run_fuzzer(module: str, *arguments: str, seconds: float) -> str:
    """Run a fuzz module in a child process, and require exit code 0.

    Return the output lines that report numbers of inputs, joined by semicolons.
    """
    command = module_command(module, *arguments, "--seconds", seconds)
    completed = subprocess.run(
        command,
        env=suites_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds + _START_AND_EXIT_TIMEOUT_S,
    )
    assert completed.returncode == 0, completed.stdout[-4000:]
    assert "changed inputs in" in completed.stdout, completed.stdout
    count_labels = ("changed inputs in", "number_of_executed_units")
    return "; ".join(line for line in completed.stdout.splitlines() if any(label in line for label in count_labels))


def main(targets: Mapping[str, FuzzTarget]) -> None:
    """Fuzz a target, which the command line names, for some seconds. Print the number of inputs.

    The exit code is 0 if no check raised an exception. The first half of the time is for random changes, which stay
    close to valid inputs. The second half is for atheris. If atheris is not installed, all of the time is for random
    changes.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", nargs="?", choices=targets, default=next(iter(targets)))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    target = targets[options.target]
    has_atheris = importlib.util.find_spec("atheris") is not None
    method_duration_s = options.seconds / 2 if has_atheris else options.seconds
    for data in target.valid_inputs:
        target.check_input(data)
    changed_input_count = _check_until(
        generate_changed_inputs(target, options.seed), target.check_input, time.monotonic() + method_duration_s
    )
    atheris_remark = (
        f"and then atheris for {method_duration_s:g} s" if has_atheris else "atheris is not installed for this Python"
    )
    print(f"{changed_input_count} changed inputs in {method_duration_s:g} s; {atheris_remark}", flush=True)  # noqa: T201
    if has_atheris:
        _run_atheris(target, method_duration_s, options.seed)


def _check_until(inputs: Iterable[bytes], check: Callable[[bytes], None], end_s: float) -> int:
    """Check inputs until `time.monotonic()` is `end_s`, and return the number of checked inputs."""
    count = 0
    for data in inputs:
        if time.monotonic() >= end_s:
            break
        check(data)
        count += 1
    return count


def _run_atheris(target: FuzzTarget, seconds: float, seed: int) -> NoReturn:
    atheris = importlib.import_module("atheris")
    for owner in target.instrumented_owners:
        for member in vars(owner).values():
            function = getattr(member, "__func__", member)
            # A module also has the functions that it imports; atheris does not instrument them.
            is_defined_here = inspect.isclass(owner) or getattr(function, "__module__", None) == owner.__name__
            if inspect.isfunction(function) and is_defined_here:
                atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as corpus:
        for index, data in enumerate(target.valid_inputs):
            Path(corpus, str(index)).write_bytes(data)
        options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-max_len={target.length_max_bytes}"]
        options += ["-print_final_stats=1", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *options, corpus], target.check_input)
        # This call exits the process with code 0 after the time, or with code 77 at the first input whose check raises.
        atheris.Fuzz()
    sys.exit(0)


def _replace_byte(_target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    data[offset : offset + 1] = rng.randbytes(1)


def _replace_field(_target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    length = rng.choice((4, 8))
    data[offset : offset + length] = rng.randbytes(length)


def _replace_by_extreme(_target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    data[offset : offset + 8] = rng.choice(_EXTREME_INTEGERS)


def _replace_by_alphabet_character(target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    data[offset : offset + 1] = bytes([rng.choice(target.alphabet)])


def _insert_bytes(_target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    data[offset:offset] = rng.randbytes(rng.randint(1, 8))


def _insert_token(target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    data[offset:offset] = rng.choice(target.tokens)


def _insert_copy(_target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    copy_begin = rng.randrange(len(data) + 1)
    data[offset:offset] = data[copy_begin : copy_begin + rng.randint(1, 120)]


def _delete_bytes(target: FuzzTarget, data: bytearray, offset: int, rng: random.Random) -> None:
    del data[offset : offset + rng.randint(1, 20 if target.tokens else 8)]


_BINARY_CHANGES = (_replace_field, _replace_by_extreme, _delete_bytes, _insert_bytes)
_TEXT_CHANGES = (_replace_byte, _insert_token, _delete_bytes, _insert_copy)
