"""Fuzz driver of the parsers: random changes of valid inputs, then atheris if it is installed for this Python.

A fuzz target is a module of the suites that calls :func:`main` with its parsers. :func:`run_fuzzer` runs one in a child
process, because atheris ends its process.
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

__all__ = ["FuzzTarget", "changed_inputs", "main", "parse_or_malformed", "run_fuzzer"]

_EXTREMES = (b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80")
_START_AND_END_S = 90.0


@dataclass(frozen=True)
class FuzzTarget:
    """A parser and its valid inputs.

    Attributes
    ----------
    check : callable
        It parses an input and raises if the parser does anything but return a result or its documented error.
    valid : sequence of bytes
        Inputs that the parser accepts.
    instrumented : sequence of modules and classes
        Their functions guide atheris by coverage.
    changes : tuple of int
        Least and most number of random changes of an input.
    alphabet : bytes
        Characters of a text format. A change may replace a byte by one of them.
    tokens : sequence of bytes
        Words of a text format. A change may insert one of them. Without tokens the format is binary.
    length_max : int
        Longest input of atheris, in bytes.
    """

    check: Callable[[bytes], None]
    valid: Sequence[bytes]
    instrumented: Sequence[ModuleType | type]
    changes: tuple[int, int] = (0, 4)
    alphabet: bytes = b""
    tokens: Sequence[bytes] = ()
    length_max: int = 1024

    def changed(self, chance: random.Random) -> bytes:
        """Return a valid input with random changes."""
        data = bytearray(chance.choice(self.valid))
        kinds = _TEXT_CHANGES if self.tokens else _BINARY_CHANGES
        if self.alphabet:
            kinds = (*kinds, _replace_by_letter)
        for _ in range(chance.randint(*self.changes)):
            chance.choice(kinds)(self, data, chance.randrange(len(data) + 1), chance)
        return bytes(data)


def changed_inputs(target: FuzzTarget, seed: int, count: int | None = None) -> Iterator[bytes]:
    """Yield `count` valid inputs with random changes, or infinitely many."""
    chance = random.Random(seed)
    for _ in itertools.repeat(None) if count is None else range(count):
        yield target.changed(chance)


def parse_or_malformed(parse: Callable[[bytes], bytes], data: bytes) -> None:
    """Require that `parse`, which packs its result again, returns the same bytes or raises UsageError(MALFORMED)."""
    try:
        packed = parse(data)
    except UsageError as error:
        if error.reason is not Reason.MALFORMED:
            raise
    else:
        if packed != data:
            message = f"{data.hex()} is parsed and packed as {packed.hex()}"
            raise AssertionError(message)


def run_fuzzer(module: str, *arguments: str, seconds: float) -> str:
    """Run a fuzz target in a child process, require exit code 0, and return the last line of its output."""
    command = module_command(module, *arguments, "--seconds", seconds)
    done = subprocess.run(
        command,
        env=suites_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds + _START_AND_END_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "changed inputs in" in done.stdout, done.stdout
    return done.stdout.splitlines()[-1]


def main(targets: Mapping[str, FuzzTarget]) -> None:
    """Fuzz one target for a time, and print the number of inputs.

    The exit code is 0 if no check raised. Half of the time is for random changes, which stay close to valid inputs, and
    half for atheris, or all of it for random changes if atheris is not installed.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", nargs="?", choices=targets, default=next(iter(targets)))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    target = targets[options.target]
    has_atheris = importlib.util.find_spec("atheris") is not None
    share_s = options.seconds / 2 if has_atheris else options.seconds
    for data in target.valid:
        target.check(data)
    count = _check_until(changed_inputs(target, options.seed), target.check, time.monotonic() + share_s)
    guided = f"and then atheris for {share_s:g} s" if has_atheris else "atheris is not installed for this Python"
    print(f"{count} changed inputs in {share_s:g} s; {guided}", flush=True)  # noqa: T201
    if has_atheris:
        _run_atheris(target, share_s, options.seed)


def _check_until(inputs: Iterable[bytes], check: Callable[[bytes], None], end_s: float) -> int:
    """Check inputs until this time of the monotonic clock, and return their number."""
    count = 0
    for data in inputs:
        if time.monotonic() >= end_s:
            break
        check(data)
        count += 1
    return count


def _run_atheris(target: FuzzTarget, seconds: float, seed: int) -> NoReturn:
    atheris = importlib.import_module("atheris")
    for owner in target.instrumented:
        for member in vars(owner).values():
            function = getattr(member, "__func__", member)
            is_own = inspect.isclass(owner) or getattr(function, "__module__", None) == owner.__name__
            if inspect.isfunction(function) and is_own:
                atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(target.valid):
            Path(corpus, str(number)).write_bytes(data)
        options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-max_len={target.length_max}"]
        atheris.Setup([sys.argv[0], *options, "-verbosity=0", corpus], target.check)
        # This call ends the process: with exit code 0 after the time, or 77 at the first input whose check raises.
        atheris.Fuzz()
    sys.exit(0)


def _replace_byte(_target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    data[at : at + 1] = chance.randbytes(1)


def _replace_field(_target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    length = chance.choice((4, 8))
    data[at : at + length] = chance.randbytes(length)


def _replace_by_extreme(_target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    data[at : at + 8] = chance.choice(_EXTREMES)


def _replace_by_letter(target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    data[at : at + 1] = bytes([chance.choice(target.alphabet)])


def _insert_bytes(_target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = chance.randbytes(chance.randint(1, 8))


def _insert_token(target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    data[at:at] = chance.choice(target.tokens)


def _insert_copy(_target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    begin = chance.randrange(len(data) + 1)
    data[at:at] = data[begin : begin + chance.randint(1, 120)]


def _delete(target: FuzzTarget, data: bytearray, at: int, chance: random.Random) -> None:
    del data[at : at + chance.randint(1, 20 if target.tokens else 8)]


_BINARY_CHANGES = (_replace_field, _replace_by_extreme, _delete, _insert_bytes)
_TEXT_CHANGES = (_replace_byte, _insert_token, _delete, _insert_copy)
