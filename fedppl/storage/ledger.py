"""A site's account as a file: JSON that anybody may read, with a signature by the owner's key."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedppl.storage import checkpoint
from fedppl.storage import signed as _key
from fedppl.types import DataError

_LABEL = b"fedppl ledger 1\n"


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote.

    Raises
    ------
    DataError
        If it is no account, or was changed since.
    DeclarationError
        If the key cannot be read.
    """
    shown = repr(str(path))
    try:
        found = json.loads(path.read_bytes())
        signature = bytes.fromhex(found.pop("signature", ""))
        content: dict[str, Any] = found
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{shown} is no account of a site ({type(error).__name__}). Put back what was there."
        ) from error
    if not hmac.compare_digest(signature, _signature(_key.of_owner(make=False), content)):
        raise DataError(
            f"{shown} is not signed with the key in {str(_key.path())!r}: somebody changed it, or put another key "
            "there. Put back what was there; moving the whole folder away grants every limit anew."
        )
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Put an account in place in one step, signed with the owner's key, which is made where there is none."""
    signature = _signature(_key.of_owner(make=True), content).hex()
    checkpoint.replace(path, json.dumps({**content, "signature": signature}).encode())


def _signature(key: bytes, content: Mapping[str, Any]) -> bytes:
    return hmac.digest(key, _LABEL + json.dumps(content, sort_keys=True).encode(), "sha256")
