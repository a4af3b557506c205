r"""Sums over clients of which nobody sees the parts: fixed point in a ring of 64 bits, under masks that pairs share.

.. math:: c_k = \mathrm{fixed}(x_k) + \sum_{j > k} m_{kj} - \sum_{j < k} m_{jk} \pmod{2^{64}}, \qquad
          \sum_k c_k = \sum_k \mathrm{fixed}(x_k)

A client sends c_k, which is uniform over the ring for everybody who does not know all masks m_kj of k with the others.
In the sum over the whole cohort they cancel; without one client it is as random as each part. Each number is two words:
multiples of 2⁻²⁰, and of 2⁻⁶⁰ what these leave, so that the sum has the digits of float64. Two counts follow: numbers
too large for the ring, and numbers that are not finite. By 54 words a number sums of any size are exact (`wide`).

A client has an identity (Ed25519) that the others know beforehand, and for each run a key (X25519) that its identity
has signed, so that a server that passes keys on cannot put its own in between. Masks are a stream of ChaCha20 under a
key that HKDF derives from what both agree on, from the run and from the cohort, and HMAC from the round and from what
was asked: clients who were shown different cohorts, or were asked different things, have a sum that is noise.

References
----------
.. [1] Bonawitz et al. (2017), Practical secure aggregation for privacy-preserving machine learning, CCS.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts import Requests, Summed
from fedppl.engine.policy import FEWEST_SITES
from fedppl.settings import one_line, shown
from fedppl.storage.signed import open_to_write, reason, replace, write_through
from fedppl.types import DeclarationError, Message

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "secure sums need the package cryptography, which is not installed; pip install 'fedppl[secure]'."
    ) from error

Words = NDArray[np.uint64]
Identity = ed25519.Ed25519PrivateKey  # a client's own: the others have its public part on their rosters

_SUMMED = "use fedppl.Sums(), or another algorithm whose server reads sums alone, or leave secure= out."
_NOISE = "masks of the cohort do not cancel: its members were not asked the same, or have other code"
_COARSE, _FINE = 2.0**20, 2.0**60  # steps of the two words of a number, for each unit
_KEY_WORDS = 4  # of a key of 256 bits
_WORD = 62  # bits that the sum of a word's parts may have, beside its sign
_UNIT = 1 << 1074  # steps of a wide number, for each unit: every float64 is a whole number of them
_LIMB = 40  # bits of a word of a wide number, so that those of 2²² clients add up; fewer bits take more words
_LIMBS = math.ceil((1024 + 1074) / _LIMB)  # up to the largest float64
WIDE = _LIMBS + 1  # words of a wide number: the last says that it is not finite


class RunKey(NamedTuple):
    """A client's key of one run, which is in memory alone, signed by the client's identity."""

    name: str
    run: str
    private: x25519.X25519PrivateKey
    signature: bytes  # of its public part, by the identity


class Greeting(NamedTuple):
    """What a client shows the others at the start of a run, by way of the server."""

    name: str
    public: bytes
    signature: bytes


class Member(NamedTuple):
    """A client's place in a cohort."""

    name: str
    keys: Mapping[str, bytes]  # of masks, by the names of the others


class Part(NamedTuple):
    """A member's masked words with its signature, for all members to add: the server cannot change the sum."""

    name: str
    words: bytes
    signature: bytes


def derived_key(identity: ed25519.Ed25519PrivateKey, name: str, run: str, place: str = "") -> RunKey:
    """A client's key of a run, always the same; `place` tells apart those of one identity.

    There is no forward secrecy: whoever gets the identity later, and has recorded what travelled, takes the masks off.
    """
    about = b"".join(_framed(part.encode()) for part in (name, run, place))
    secret = HKDF(hashes.SHA256(), 32, None, b"fedppl run key" + about).derive(identity.private_bytes_raw())
    private = x25519.X25519PrivateKey.from_private_bytes(secret)
    return RunKey(name, run, private, identity.sign(_signed(name, run, private.public_key().public_bytes_raw())))


def greeting(key: RunKey) -> Greeting:
    """What the others need."""
    return Greeting(key.name, key.private.public_key().public_bytes_raw(), key.signature)


def joined(key: RunKey, greetings: Sequence[Greeting], roster: Mapping[str, bytes], agreed: str = "") -> Member:
    """A client's place in a cohort: of its own greeting, and others that identities on its roster signed.

    Who has `agreed` on something else than the others has other masks.
    """
    names = {one.name for one in greetings}
    if len(names) < max(FEWEST_SITES, len(greetings)):
        wanted = f"at least {FEWEST_SITES} different ones are wanted; wait until more sites take part"
        raise DeclarationError(f"a cohort of {len(names)} sites, and {wanted}.")
    if greeting(key) not in greetings:
        raise DeclarationError(f"the cohort {sorted(names)} lacks the key of this site, {key.name!r}.")
    for one in greetings:
        _require_signed(one, key.run, roster)
    # With both names: a member that passes another's key for its own would have the masks of a pair cancel each other.
    about = b"fedppl masks" + _framed(key.run.encode()) + _framed(agreed.encode()) + digest(greetings)
    keys = {
        one.name: HKDF(
            hashes.SHA256(), 32, None, about + b"".join(_framed(name.encode()) for name in sorted((key.name, one.name)))
        ).derive(key.private.exchange(x25519.X25519PublicKey.from_public_bytes(one.public)))
        for one in greetings
        if one.name != key.name
    }
    return Member(key.name, keys)


def digest(greetings: Sequence[Greeting]) -> bytes:
    """A digest of a cohort, in any order."""
    parts = (_framed(part) for one in sorted(greetings) for part in (one.name.encode(), one.public))
    return hashlib.sha256(b"".join(parts)).digest()


def _require_signed(one: Greeting, run: str, roster: Mapping[str, bytes]) -> None:
    if one.name not in roster:
        remedy = "add its identity once you have it from that site itself, or leave it out"
        raise DeclarationError(f"site {one.name!r} is not on this site's roster {sorted(roster)}: {remedy}.")
    _verify(roster[one.name], one.signature, _signed(one.name, run, one.public), one.name, f"key of run {run!r}")


def _verify(public: bytes, signature: bytes, content: bytes, name: str, what: str) -> None:
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except InvalidSignature:
        raise DeclarationError(
            f"the {what} of site {name!r} is not signed by the identity on this site's roster: somebody stands in "
            "between, or that site has a new identity; ask it."
        ) from None


def published(identity: ed25519.Ed25519PrivateKey, name: str, about: bytes, words: Words) -> Part:
    """A member's masked words, signed for what they are about."""
    raw = words.astype("<u8").tobytes()
    return Part(name, raw, identity.sign(_of_part(name, about, raw)))


def verified(
    parts: Sequence[Part], names: Sequence[str], about: bytes, roster: Mapping[str, bytes]
) -> dict[str, Words]:
    """The words that all members have signed for what they are about, by name, or DeclarationError."""
    if sorted(part.name for part in parts) != sorted(names) or len({len(part.words) for part in parts}) != 1:
        got = f"{len(parts)} parts, of {sorted(part.name for part in parts)}, and one of each is wanted, of one length"
        raise DeclarationError(f"{got}: the cohort is {sorted(names)}; the server has to send all, or begin a new run.")
    for part in parts:
        _verify(roster[part.name], part.signature, _of_part(part.name, about, part.words), part.name, "part of a sum")
    return {part.name: np.frombuffer(part.words, dtype="<u8").astype(np.uint64) for part in parts}


def sealed(member: Member, words: Words, number: int, asked: bytes) -> Words:
    """Words under masks, and under a stream that the other members alone can take off: a sum for their eyes.

    The stream's key follows, once for each of them in the order of their names, under what both have in common.
    """
    own = _own_key(member, number, asked)
    hidden = masked(member, words, number, asked)
    keys = [_under(key, own, member.name, number, asked) for _, key in sorted(member.keys.items())]
    return np.concatenate([hidden + _stream(own, number, asked, len(words)), np.frombuffer(b"".join(keys), "<u8")])


def opened(member: Member, name: str, words: Words, number: int, asked: bytes) -> Words:
    """What a member, by name, has sealed; still under masks."""
    others = sorted({*member.keys, member.name} - {name})
    end = len(words) - _KEY_WORDS * len(others)
    if end < 0:
        rule = f"too few for {_KEY_WORDS} to each other member; that site has other code: ask it"
        raise DeclarationError(f"the part of site {name!r} has {len(words)} words, {rule}.")
    if name == member.name:
        key = _own_key(member, number, asked)
    else:
        start = end + _KEY_WORDS * others.index(member.name)
        key = _under(member.keys[name], words[start : start + _KEY_WORDS].tobytes(), name, number, asked)
    return np.asarray(words[:end] - _stream(key, number, asked, end))


def _own_key(member: Member, number: int, asked: bytes) -> bytes:
    """The key of a member's stream: always the same, so that a part is, and of all its keys, which nobody else has."""
    together = b"".join(key for _, key in sorted(member.keys.items()))
    return hmac.digest(together, _about_seal(number, asked), "sha256")


def _under(key: bytes, secret: bytes, sender: str, number: int, asked: bytes) -> bytes:
    """A key under one that two members share, and back; each direction has its own."""
    pad = hmac.digest(key, _about_seal(number, asked) + _framed(sender.encode()), "sha256")
    return bytes(a ^ b for a, b in zip(secret, pad, strict=True))


def _about_seal(number: int, asked: bytes) -> bytes:
    return b"fedppl seal" + _framed(str(number).encode()) + _framed(asked)


def _of_part(name: str, about: bytes, raw: bytes) -> bytes:
    return b"fedppl part" + b"".join(map(_framed, (name.encode(), about, raw)))


def encoded(message: Mapping[str, Any], clients: int) -> Words:
    """A message as words (2 n + 2,), in the order of the names of its arrays; what does not fit is 0, and counted.

    >>> words = sum(encoded({"a": np.array([1.5, -2.25])}, 3) for _ in range(3))
    >>> decoded(words, {"a": (2,)})[0]
    {'a': array([ 4.5 , -6.75])}
    """
    parts = [np.asarray(message[name], dtype=float).ravel() for name in sorted(message)]
    numbers = np.concatenate([np.zeros(0), *parts])
    is_finite = np.isfinite(numbers)
    fits = np.abs(numbers, where=is_finite, out=np.zeros(len(numbers))) * _COARSE < 2.0**_WORD / clients
    kept = np.where(is_finite & fits, numbers, 0.0)
    coarse = np.rint(kept * _COARSE)
    fine = np.rint((kept - coarse / _COARSE) * _FINE)
    cut, missing = int(np.sum(is_finite & ~fits)), int(np.sum(~is_finite))
    return np.concatenate([coarse, fine, [cut, missing]]).astype(np.int64).view(np.uint64)


def decoded(words: Words, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Any], int, int]:
    """Arrays of a sum, with counts of numbers that did not fit and of those that were not finite."""
    numbers = words.view(np.int64).astype(float)
    count = (len(numbers) - 2) // 2
    values, total, start = numbers[:count] / _COARSE + numbers[count:-2] / _FINE, {}, 0
    for name in sorted(shapes):
        size = int(np.prod(shapes[name], dtype=np.int64))
        total[name] = values[start : start + size].reshape(shapes[name])
        start += size
    return total, int(numbers[-2]), int(numbers[-1])


def wide(numbers: Sequence[float]) -> Words:
    """Numbers of any size as words (54 n,), exactly: digits of base 2⁴⁰ with the number's sign.

    >>> read_wide(wide([1e-300, 1e60]) + wide([2e-300, -2.5]), clients=2)
    [3e-300, 1e+60]
    """
    words: list[int] = []
    for number in numbers:
        is_finite = math.isfinite(number)
        above, below = float(number).as_integer_ratio() if is_finite else (0, 1)
        steps, sign = abs(above) * (_UNIT // below), 1 if above >= 0 else -1
        words += [sign * (steps >> (_LIMB * k) & ((1 << _LIMB) - 1)) for k in range(_LIMBS)] + [not is_finite]
    return np.array(words, dtype=np.int64).view(np.uint64)


def read_wide(words: Words, clients: int) -> list[float]:
    """The numbers of a sum over clients, each rounded once; NaN where a part is not finite, and DeclarationError."""
    numbers = []
    for *digits, others in words.view(np.int64).reshape(-1, WIDE).tolist():
        if not 0 <= others <= clients or any(abs(digit) > clients << _LIMB for digit in digits):
            raise DeclarationError(f"{_NOISE}.")
        steps = sum(digit << (_LIMB * k) for k, digit in enumerate(digits))
        try:
            numbers.append(math.nan if others else steps / _UNIT)
        except OverflowError:
            numbers.append(math.inf if steps > 0 else -math.inf)
    return numbers


def masked(member: Member, words: Words, number: int, asked: bytes = b"") -> Words:
    """Words under the masks of a round, and of what was `asked` of all; of two, the difference would be bare.

    That a round is answered once is for the caller, who keeps what was sent.
    """
    hidden = words.copy()
    for other, key in member.keys.items():
        mask = _stream(key, number, asked, len(words))
        hidden = hidden + mask if member.name < other else hidden - mask
    return np.asarray(hidden)


def noise(member: Member, words: int, number: int, asked: bytes = b"") -> Words:
    """Words that nobody knows but the member, always the same for what was `asked` in a round."""
    key = hashlib.sha256(b"fedppl noise" + b"".join(_framed(key) for _, key in sorted(member.keys.items()))).digest()
    return _stream(key, number, asked, words)


def added(parts: Sequence[Words]) -> Words:
    """The sum of all parts in the ring."""
    return np.asarray(np.sum(np.stack(parts), axis=0, dtype=np.uint64))


def summed(parts: Mapping[str, Words], shapes: Mapping[str, tuple[int, ...]]) -> Summed:
    """The sum of a cohort's masked words, by name; void where a number is none or too large, or masks do not cancel."""
    total, cut, missing = decoded(added(list(parts.values())), shapes)
    most = sum(map(len, parts.values()))
    if not (0 <= cut <= most and 0 <= missing <= most):
        reason = _NOISE
    elif cut or missing:
        reason = f"{cut} numbers of the cohort are too large for its sum, and {missing} are not finite"
    else:
        return Summed(total, len(parts), sizes={name: words.nbytes for name, words in parts.items()})
    return void(dict.fromkeys(parts, reason))


def void(failures: Mapping[str, str]) -> Summed:
    """A round without a sum, and who is why."""
    return Summed({}, 0, failures, sizes={})


# What a server whose sums are secure asks -----------------------------------------------------------------------------


def require_enough(clients: int) -> None:
    """Raise DeclarationError where a cohort would be too small."""
    if clients < FEWEST_SITES:
        raise DeclarationError(f"secure=True needs {FEWEST_SITES} clients, and has {clients}; leave secure= out.")


def require_all(requests: Requests, clients: tuple[str, ...]) -> None:
    """Raise DeclarationError where a round is not of all clients."""
    if requests.silent or requests.clients != clients:
        why = "since two sums that differ by one client tell that client's part"
        raise DeclarationError(f"secure sums are of all clients, {why}: leave participation= and reporting= out.")


def single(algorithm: str) -> DeclarationError:
    """The error of an algorithm that asks for single replies."""
    return DeclarationError(f"{algorithm} asks for single replies, and sums are secure: {_SUMMED}")


def require_same(messages: Sequence[Message], algorithm: str) -> None:
    """Raise DeclarationError where clients are not asked the same, so that their masks would not cancel."""
    first = messages[0]
    for other in messages[1:]:
        if set(other) != set(first) or not all(np.array_equal(other[k], first[k], equal_nan=True) for k in first):
            raise DeclarationError(f"{algorithm} asks each client another thing, and sums are secure: {_SUMMED}")


def cohort_of(names: Sequence[str], run: str) -> dict[str, Member]:
    """All clients' places in a cohort in one process, with identities made for it, by name."""
    identities = {name: Identity.generate() for name in names}
    keys = {name: derived_key(identity, name, run) for name, identity in identities.items()}
    roster = {name: identity.public_key().public_bytes_raw() for name, identity in identities.items()}
    greetings = [greeting(key) for key in keys.values()]
    return {name: joined(key, greetings, roster) for name, key in keys.items()}


def _stream(key: bytes, number: int, asked: bytes, words: int) -> Words:
    # A key of its own, not a nonce: of 12 bytes, of which the server chooses a part, two would be made equal.
    once = hmac.digest(key, b"fedppl round" + _framed(b"%d" % number) + asked, "sha256")
    stream = Cipher(algorithms.ChaCha20(once, bytes(16)), mode=None).encryptor().update(bytes(8 * words))
    return np.frombuffer(stream, dtype=np.uint64)


def _signed(name: str, run: str, public: bytes) -> bytes:
    return b"fedppl run key" + _framed(name.encode()) + _framed(run.encode()) + public


def _framed(part: bytes) -> bytes:
    """A part with its length, so that no two lists of parts have the same bytes."""
    return len(part).to_bytes(4, "little") + part


# What one recipient alone can read ------------------------------------------------------------------------------------


def sealing_key(identity: Identity) -> x25519.X25519PrivateKey:
    """The key by which an identity opens what was enclosed for it, always the same."""
    secret = HKDF(hashes.SHA256(), 32, None, _SEALING).derive(identity.private_bytes_raw())
    return x25519.X25519PrivateKey.from_private_bytes(secret)


def enclosed(header: bytes, body: bytes, sender: Identity, recipient: bytes) -> bytes:
    """A body for the sealing key of one recipient alone, beside a header in the clear, both signed by the sender.

    Who gets the recipient's identity later reads it, and who gets the sender's does not.
    """
    once = x25519.X25519PrivateKey.generate()
    public, to = once.public_key().public_bytes_raw(), x25519.X25519PublicKey.from_public_bytes(recipient)
    key = _bundle_key(once.exchange(to), header, public)
    content = public + ChaCha20Poly1305(key).encrypt(bytes(12), body, header)  # a key is used once, and so this nonce
    return content + sender.sign(_of_bundle(header, content))


def disclosed(header: bytes, raw: bytes, sender: bytes, recipient: Identity) -> bytes:
    """The body of what a sender enclosed for this recipient, once the signature holds; or DeclarationError."""
    content, signature = raw[:-_SIGNATURE], raw[-_SIGNATURE:]
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(sender).verify(signature, _of_bundle(header, content))
        once = x25519.X25519PublicKey.from_public_bytes(content[:_LENGTH])
        key = _bundle_key(sealing_key(recipient).exchange(once), header, content[:_LENGTH])
        return ChaCha20Poly1305(key).decrypt(bytes(12), content[_LENGTH:], header)
    except InvalidSignature:
        rule = "its signature is not by the identity that is known here: it was cut or changed, or is another's"
        raise DeclarationError(f"{rule}; copy it again, or ask the sender whether the identity is a new one.") from None
    except (InvalidTag, ValueError):
        rule = "it was not encrypted for the key of this identity"
        raise DeclarationError(
            f"{rule}; give the sender the line that python -m fedppl.site identity prints."
        ) from None


def _bundle_key(shared: bytes, header: bytes, once: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, None, b"fedppl bundle key" + once + _framed(header)).derive(shared)


def _of_bundle(header: bytes, content: bytes) -> bytes:
    return b"fedppl bundle" + _framed(header) + content


# Identities, rosters and the server's line, as files of a folder ------------------------------------------------------

IDENTITY, ROSTER, SERVER = "identity", "roster", "server"
NO_SEALING = "has no key to encrypt for, of an earlier version; have python -m fedppl.site identity print it again"
_SEALING = b"fedppl sealing key"
_LENGTH, _SIGNATURE = 32, 64  # bytes of a key and of a signature
_LINES = _LENGTH, 2 * _LENGTH + _SIGNATURE  # bytes of a public line: of an earlier version without the sealing key
_LONGEST = 200  # characters of a name, as of a client's id
_MOST = 2**20  # bytes of a file


class Keys(NamedTuple):
    """What a folder with an identity holds."""

    name: str
    identity: Identity
    roster: Mapping[str, bytes]  # public identities by name, its own among them
    sealing: Mapping[str, bytes] = {}  # keys to encrypt for, of those whose line has one


def make_identity(folder: Path, name: str) -> str:
    """Make an identity in a folder and return its public line; one that is there stays."""
    path = folder / IDENTITY
    _require_name(name, f"name {shown(name)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Identity.generate()
    try:
        file = open_to_write(path, os.O_EXCL)
    except FileExistsError as error:
        there = read_keys(folder)
        line = line_of(there.name, public(there.identity))
        rule = f"is there, and is made once: its public line is {line!r}"
        raise DeclarationError(f"{str(path)!r} {rule}; move it away to make a new one.") from error
    with file:
        write_through(file, f"{line_of(name, made.private_bytes_raw())}\n".encode())
    return line_of(name, public(made))


def public(identity: Identity) -> bytes:
    """What others have to know of an identity: its public key, its sealing key, and its signature of the latter."""
    sealing = sealing_key(identity).public_key().public_bytes_raw()
    return identity.public_key().public_bytes_raw() + sealing + identity.sign(_SEALING + sealing)


def add_to_roster(folder: Path, line: str) -> str:
    """Add a site's public line to the roster in a folder, and return the site's name."""
    path, where = folder / ROSTER, f"line {one_line(line, 60)!r}"
    name, key = _new_line(folder, line, {**_roster(path), **_server(folder)}, where)
    lines = path.read_bytes().splitlines() if path.exists() else []
    replace(path, b"\n".join([*lines, f"{line_of(name, key)}\n".encode()]))
    return name


def set_server(folder: Path, line: str) -> str:
    """Keep a server's public line beside a roster, of which it is no member, and return its name.

    Its identity is not one of the roster's: a server that stood there could join a cohort.
    """
    where = f"line {one_line(line, 60)!r}"
    name, key = _new_line(folder, line, _roster(folder / ROSTER), where)
    if len(key) == _LENGTH:
        raise DeclarationError(f"{where} {NO_SEALING}.")
    replace(folder / SERVER, f"{line_of(name, key)}\n".encode())
    return name


def read_server(folder: Path) -> tuple[str, bytes, bytes]:
    """Name, public identity and sealing key of the server that a site knows; DeclarationError without one."""
    for name, key in _server(folder).items():
        if len(key) > _LENGTH:
            return name, key[:_LENGTH], key[_LENGTH : 2 * _LENGTH]
    remedy = f"add the line that the server has printed: python -m fedppl.site server {folder} LINE"
    raise DeclarationError(f"{str(folder / SERVER)!r} names no server; {remedy}.")


def _server(folder: Path) -> dict[str, bytes]:
    return _roster(folder / SERVER)


def _new_line(folder: Path, line: str, known: Mapping[str, bytes], where: str) -> tuple[str, bytes]:
    """Name and keys of a line that is to be added to what a folder knows."""
    if not folder.is_dir():
        remedy = f"make the site's identity first, python -m fedppl.site identity {folder}"
        raise DeclarationError(f"folder {str(folder)!r} is none; {remedy}.")
    name, key = _parsed(line, where)
    _require_new(name, key, known, where)
    return name, key


def read_keys(folder: Path) -> Keys:
    """Read identity and roster.

    Raises
    ------
    DeclarationError
        Where a file is missing, the identity is open to others, or a line is none.
    """
    path = folder / IDENTITY
    name, secret = _parsed(_private(path), f"identity {str(path)!r}", (_LENGTH,))
    identity = Identity.from_private_bytes(secret)
    own, roster = public(identity), _roster(folder / ROSTER)
    if roster.get(name, own)[:_LENGTH] == own[:_LENGTH]:
        roster.pop(name, None)
    _require_new(name, own, roster, f"this site, in {str(folder / ROSTER)!r},")
    known = {**roster, name: own}
    for server, key in _server(folder).items():
        _require_new(server, key, known, f"the server, in {str(folder / SERVER)!r},")
    sealing = {other: key[_LENGTH : 2 * _LENGTH] for other, key in known.items() if len(key) > _LENGTH}
    return Keys(name, identity, {other: key[:_LENGTH] for other, key in known.items()}, sealing)


def _private(path: Path) -> str:
    """Content of a file that only its owner may read."""
    what = f"identity {str(path)!r}"
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        remedy = f"make one by python -m fedppl.site identity {path.parent}"
        raise DeclarationError(f"{what} cannot be read ({reason(error)}); {remedy}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (os.name == "posix" and status.st_mode & 0o077):
            rule = f"open to others (mode {stat.S_IMODE(status.st_mode):o}), who could take this site's masks off"
            raise DeclarationError(f"{what} is {rule}; chmod 600 if nobody has read it, else make and send another.")
        return file.read(_MOST).decode(errors="replace")


def _roster(path: Path) -> dict[str, bytes]:
    """Public identities by name; lines that are empty or begin with # are none."""
    written = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return dict(_members(written, str(path)))


@functools.lru_cache(maxsize=8)
def _members(written: str, path: str) -> tuple[tuple[str, bytes], ...]:
    """Names and identities of a roster, once in a process: a site reads its own at each request."""
    roster: dict[str, bytes] = {}
    for number, line in enumerate(written.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            where = f"line {number} of {path!r}"
            name, key = _parsed(line, where)
            _require_new(name, key, roster, where)
            roster[name] = key
    return tuple(roster.items())


def _parsed(line: str, where: str, lengths: tuple[int, ...] = _LINES) -> tuple[str, bytes]:
    name, _, text = line.strip().rpartition(" ")
    name = name.strip()
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) not in lengths or (len(key) > _LENGTH and not _is_signed(key)):
        rule = f"is not a name, a space and {' or '.join(map(str, lengths))} bytes in base64, as they were printed"
        raise DeclarationError(f"{where} {rule}; copy the whole line that the site printed.")
    _require_name(name, where)
    return name, key


def _is_signed(key: bytes) -> bool:
    """Whether an identity has signed its sealing key."""
    signing, sealing, signature = key[:_LENGTH], key[_LENGTH : 2 * _LENGTH], key[2 * _LENGTH :]
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(signing).verify(signature, _SEALING + sealing)
    except InvalidSignature:
        return False
    return True


def _require_name(name: str, where: str) -> None:
    if not (0 < len(name) <= _LONGEST and name.isprintable() and name == name.strip() and not name.startswith("#")):
        rule = f"1 to {_LONGEST} printable characters, no space at an end and no # in front"
        raise DeclarationError(f"{where} has a name that is not {rule}; give the site's client-id.")


def _require_new(name: str, key: bytes, known: Mapping[str, bytes], where: str) -> None:
    other = name if name in known else next((one for one, its in known.items() if its[:_LENGTH] == key[:_LENGTH]), None)
    if other is not None:
        what = "name" if other == name else "key"
        raise DeclarationError(
            f"{where} is a duplicate, with the {what} of {other!r}; take out the line that is wrong."
        )


def line_of(name: str, key: bytes) -> str:
    """A line of a name and a key, as `public` gives it."""
    return f"{name} {base64.b64encode(key).decode()}"
