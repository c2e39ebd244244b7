"""The token of a store: a secret by which a client over TCP proves that it may use the server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import Reason, UsageError, errno_name
from gdrkit.host import PrivateFolder
from gdrkit.storage.messages import TOKEN_CHARACTERS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PRIVATE_FOLDER", "read_token", "read_token_file", "read_valid_token"]

PRIVATE_FOLDER = ".gdrkit"


def read_token(root: Path) -> str:
    """Return the token of a store of this user.

    Raises
    ------
    SetupMissing
        Another user owns, or can read or change, the token or the folder that it is in.
    OSError
        There is no store, or no token.
    UsageError
        ``MALFORMED``: the token is not one line of ASCII text.
    """
    with PrivateFolder.below(root / PRIVATE_FOLDER, create=False) as private_folder:
        return read_valid_token(private_folder.read_text, "token", private_folder.path / "token")


def read_token_file(path: Path) -> str:
    """Return the token in a file that the user has copied from the machine of a server.

    Raises
    ------
    UsageError
        The file cannot be read, or does not hold a token.
    """
    try:
        return read_valid_token(lambda name: Path(name).read_text(encoding="ascii"), str(path), path)
    except OSError as error:
        message = f"open {path}: {error.strerror} ({errno_name(error.errno)})"
        what_to_do = f"copy {PRIVATE_FOLDER}/token of the server's store, readable by this user alone"
        raise UsageError(message, what_to_do=what_to_do) from error


def read_valid_token(read_text: Callable[[str], str], name: str, path: Path) -> str:
    """Return the token that `read_text(name)` returns, without white space around it. Errors show `path`."""
    try:
        token = read_text(name).strip()
    except UnicodeDecodeError as error:
        message = f"{path} must be ASCII text"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    if not token or len(token) > TOKEN_CHARACTERS_MAX or not token.isprintable():
        message = f"{path} must contain one line of 1 to {TOKEN_CHARACTERS_MAX} printable characters"
        raise UsageError(message, reason=Reason.MALFORMED)
    return token
