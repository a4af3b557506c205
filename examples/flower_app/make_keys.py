"""Make what TLS and SuperNode authentication need on loopback: a CA, the server's certificate, a key pair a site.

python make_keys.py "$WORK/keys"

For trying things out. In production every site makes its own private key and sends only the public one, and the
server's certificate comes from an authority that the sites trust.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SITES = ["north", "south", "west"]
_PRIVATE = serialization.PrivateFormat
_PLAIN = serialization.NoEncryption()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    os.chmod(path, 0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, _PLAIN))


def _certificate(subject: str, key: ec.EllipticCurvePublicKey, issuer: str) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=30))
    )


def main(argv: list[str] | None = None) -> None:
    """Write ca.crt, server.pem, server.key, and NAME with NAME.pub for every site."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sites", nargs="+", default=SITES)
    options = parser.parse_args(argv)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    root = (
        _certificate("fedppl example CA", authority.public_key(), "fedppl example CA")
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    leaf = (
        _certificate("localhost", server.public_key(), "fedppl example CA")
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", server, _PRIVATE.PKCS8)
    for site in options.sites:
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(folder / site, key, _PRIVATE.OpenSSH)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{site}.pub").write_bytes(public + b"\n")
    print(f"{folder}: CA, server certificate and keys of {', '.join(options.sites)}")


if __name__ == "__main__":
    main()
