"""Bytes of a state, signed with the owner's key: what others wrote is refused before it is looked into."""

from __future__ import annotations

import hmac
import io
import re
import struct
from typing import IO, Any

from fedppl.storage import codec as _codec
from fedppl.storage import key as _key
from fedppl.types import DeclarationError

FORMAT = 10
MOST = 2**34  # bytes of a file
_KIND = b"fedppl checkpoint "
_MAGIC = _KIND + b"%d\n" % FORMAT
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<8sQ32s")  # whose key, bytes that follow, HMAC-SHA256
_START = len(_MAGIC) + _HEAD.size


def pack(content: Any, about: str = "") -> bytes:
    """Bytes of a state, signed with the owner's key, which is made where there is none.

    Parameters
    ----------
    content
        Value to keep; `codec.encode` says what it may hold.
    about
        Name that it is kept as: nothing else is read from it.
    """
    key, body = _key.of_owner(make=True), _codec.encode(content)
    if len(body) > MOST:
        raise DeclarationError(f"the state takes {len(body):.3g} bytes, more than the {MOST} that a file may have.")
    whose = _whose(key)
    return _MAGIC + _HEAD.pack(whose, len(body), _signature(key, about, whose, body)) + body


def unpack(raw: bytes, name: str, about: str = "") -> Any:
    """Read what `pack` wrote; `name` is what errors call it."""
    return verified(io.BytesIO(raw), len(raw), name, about)


def verified(file: IO[bytes], size: int, name: str, about: str) -> Any:
    """Look at the header and the size, then at the signature, and only then at what it holds."""
    head = file.read(_START)
    version = re.match(_KIND + rb"(\d{1,9})\n", head)
    if version is None:
        raise DeclarationError(f"{name} is not a fedppl checkpoint; choose another path.")
    if int(version[1]) != FORMAT:
        raise DeclarationError(
            f"{name} has format {int(version[1])}, and this version of fedppl reads format {FORMAT}; delete it to "
            "start again, or finish it with the version that wrote it."
        )
    damaged = DeclarationError(f"{name} is truncated or damaged; restore it from a copy, or delete it to start again.")
    if not head.startswith(_MAGIC) or len(head) < _START:
        raise damaged
    whose, length, signature = _HEAD.unpack_from(head, len(_MAGIC))
    if length != size - _START:
        raise damaged
    if length > MOST:
        raise DeclarationError(f"{name} has {size} bytes, more than the {MOST} that are read; delete it.")
    key = _key.of_owner(make=False)
    if whose != _whose(key):
        raise DeclarationError(
            f"{name} was signed with another key than that in {str(_key.path())!r}, or is damaged; put the key that it "
            f"was written with there, name it by {_key.VARIABLE}, or delete the file to start again."
        )
    body = file.read(length)
    if not hmac.compare_digest(signature, _signature(key, about, whose, body)):
        raise damaged
    return decoded(body, name)


def decoded(body: bytes, name: str) -> Any:
    """What the bytes of a file hold; errors name the file."""
    try:
        return _codec.decode(body)
    except _codec.Unreadable as error:
        raise DeclarationError(
            f"{name} was not written by this version of fedppl and this program ({error}); delete it to start again."
        ) from error


def _whose(key: bytes) -> bytes:
    """What tells keys apart, and nothing else of them."""
    return hmac.digest(key, b"fedppl: which key", "sha256")[:8]


def _signature(key: bytes, about: str, whose: bytes, body: bytes) -> bytes:
    """HMAC of what something is and of what it holds; lengths keep the parts apart."""
    name = about.encode(errors="surrogatepass")
    mac = hmac.new(key, _MAGIC + whose + _LENGTH.pack(len(name)) + name + _LENGTH.pack(len(body)), "sha256")
    mac.update(body)
    return mac.digest()
