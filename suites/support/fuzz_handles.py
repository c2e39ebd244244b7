"""Feeds the handle parsers with whatever a fuzzer comes up with: ``python fuzz_handles.py --seconds 20 [--seed N]``.

atheris guides it by coverage where it is installed for this Python (PyPI: ``atheris``); elsewhere right handles are
changed at random. Either way a run ends with 0 and one line that says which it was and how many inputs it saw, or with
what an input raised besides UsageError(MALFORMED).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import random
import sys
import time
from typing import NoReturn

from gdrkit.errors import Reason, UsageError
from gdrkit.host import ProcessIdentity
from gdrkit.registration.gdr_handle import GdrHandle
from gdrkit.registration.handle import SHARE_HANDLE_BYTES, ShareHandle, ShareKind

__all__ = ["main", "one_input"]

_BODY_BYTES = SHARE_HANDLE_BYTES - 16


def one_input(data: bytes) -> None:
    """Parse it as each format; only UsageError(MALFORMED) may come out of that, or a handle that packs to the same
    bytes.
    """
    # No fuzzer guesses a SHA-256: with a right one, what is behind that check is reached too.
    body = data[:_BODY_BYTES].ljust(_BODY_BYTES, b"\0")
    for parse, candidate in (
        (ShareHandle.parse, data),
        (ShareHandle.parse, body + hashlib.sha256(body).digest()[:16]),
        (GdrHandle.parse, data),
        (GdrHandle.parse, data[:80].ljust(80, b"\0")),
    ):
        try:
            handle = parse(candidate)
        except UsageError as error:
            if error.reason is not Reason.MALFORMED:
                raise
        else:
            if handle.pack() != candidate:
                message = f"{handle} does not pack to the bytes that it was parsed from"
                raise AssertionError(message)


def _right_handles() -> list[bytes]:
    ipc = ShareHandle(
        kind=ShareKind.IPC,
        allocation_bytes=1 << 20,
        offset_bytes=5,
        length_bytes=7,
        ipc=bytes(range(64)),
        device_uuid=bytes(range(1, 17)),
        owner=ProcessIdentity(boot_id=bytes(range(16)), process_id=1234, namespace=4026531836, started_ticks=99),
    )
    vmm = dataclasses.replace(
        ipc,
        kind=ShareKind.VMM,
        allocation_bytes=6 << 20,
        length_bytes=5 << 20,
        chunk_bytes=2 << 20,
        descriptor_count=3,
        ipc=bytes(64),
    )
    dmabuf = dataclasses.replace(ipc, kind=ShareKind.DMABUF, address=(1 << 40) + 5, descriptor_count=1, ipc=bytes(64))
    return [handle.pack() for handle in (ipc, vmm, dmabuf)]


def _by_atheris(seconds: float, seed: int) -> NoReturn:
    atheris = importlib.import_module("atheris")
    for owner in (ShareHandle, GdrHandle):
        for member in vars(owner).values():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function):
                atheris.instrument_func(function)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", "-max_len=384", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options], one_input)
    # Ends the process: with 0 after that time, with 77 at the first input that raised.
    atheris.Fuzz()
    sys.exit(0)


def _by_chance(seconds: float, seed: int) -> int:
    chance, right = random.Random(seed), _right_handles()
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        data = bytearray(chance.choice(right))
        for _ in range(chance.randint(0, 4)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[at : at + 8] = chance.randbytes(8)
                case 1:
                    data[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80"))
                case 2:
                    del data[at : at + chance.randint(1, 8)]
                case _:
                    data[at:at] = chance.randbytes(chance.randint(1, 8))
        one_input(bytes(data))
        count += 1
    return count


def main() -> None:
    """Fuzz for so long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Half of the time each: what is changed at random begins with right handles, atheris with nothing.
    has_atheris = importlib.util.find_spec("atheris") is not None
    share_s = options.seconds / 2 if has_atheris else options.seconds
    for data in _right_handles():
        one_input(data)
    count = _by_chance(share_s, options.seed)
    guided = f"and then atheris for {share_s:g} s" if has_atheris else "atheris is not installed for this Python"
    print(f"{count} changed handles in {share_s:g} s; {guided}", flush=True)  # noqa: T201
    if has_atheris:
        _by_atheris(share_s, options.seed)


if __name__ == "__main__":
    main()
