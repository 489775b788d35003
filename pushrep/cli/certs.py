"""`pushrep certs`: makes a certificate authority and certificates for a trial of mutual TLS."""

import datetime as dt
import ipaddress
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import click

from pushrep.errors import BadArgument

_CA = "ca"


class _Signer(NamedTuple):
    key: Any
    name: Any


@click.command(short_help="Make certificates for a trial of mutual TLS.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="HOST",
    help="Make a certificate for a node: its host name or IP address. NAME=HOST,HOST: for a node with several, in "
    "files "
    "called NAME. Repeat it for more.",
)
@click.option(
    "--client",
    "clients",
    multiple=True,
    metavar="NAME",
    help="Make a client certificate for a service: the NAME that `pushrep replica serve --allow` gets. Repeat it for "
    "more.",
)
@click.option(
    "--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="Days for which they are valid."
)
def certs(directory: Path, nodes: tuple[str, ...], clients: tuple[str, ...], days: int) -> None:
    """Make a certificate authority and certificates in DIRECTORY, for a trial: the keys are not encrypted.

    \b
      pushrep certs tls --node 127.0.0.1 --client billing
      pushrep replica serve copies --cert tls/127.0.0.1.pem --key tls/127.0.0.1.key --ca tls/ca.pem --allow billing

    The first call makes DIRECTORY/ca.pem and ca.key. Later calls use them to add or renew certificates. A running node
    loads renewed files without a restart.
    """  # noqa: D301 - \b is click's word for: keep these lines as they are
    try:
        made = make_certificates(directory, nodes, clients, days)
    except BadArgument as error:
        raise click.UsageError(str(error)) from error
    for path in made:
        click.echo(str(path))


def make_certificates(directory: Path, nodes: tuple[str, ...], clients: tuple[str, ...], days: int = 30) -> list[Path]:
    """Write certificates and their keys, and return the paths of the certificates. Raises BadArgument, OSError.

    nodes: host names or IP addresses, which clients check; "name=host,..." for a node with several addresses, in files
        of that name.
    clients: identities, the DNS name or URI of the certificate.
    """
    from cryptography import x509  # noqa: PLC0415 - an extra
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    named = {name: hosts.split(",") if hosts else [name] for name, _, hosts in (node.partition("=") for node in nodes)}
    for name in (*named, *(host for hosts in named.values() for host in hosts), *clients):
        if not re.fullmatch(r"[\w.:/@-]{1,200}", name) or name == _CA:
            raise BadArgument(
                "name",
                f"{name!r} can't be a node's or a client's name: give 1 to 200 of A-Z a-z 0-9 _ . : / @ -, not {_CA}",
            )
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    if not (directory / f"{_CA}.pem").exists():
        made.append(_write(directory, _CA, [], None, days))
    certificate = x509.load_pem_x509_certificate((directory / f"{_CA}.pem").read_bytes())
    key = serialization.load_pem_private_key((directory / f"{_CA}.key").read_bytes(), None)
    signer = _Signer(key, certificate.subject)
    for name, hosts in named.items():
        made.append(_write(directory, name, [_alternative(host) for host in hosts], signer, days))
    for client in clients:
        is_uri = re.fullmatch(r"[a-z][a-z0-9+.-]*:.+", client) is not None
        alternative = x509.UniformResourceIdentifier(client) if is_uri else x509.DNSName(client)
        made.append(_write(directory, client, [alternative], signer, days))
    return made


def _alternative(host: str) -> Any:
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(directory: Path, name: str, alternatives: list[Any], signer: _Signer | None, days: int) -> Path:
    """Write a certificate and its key, which only this user may read. signer None: a self-signed authority."""
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    own, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pushrep trial" if signer is None else name[:64])])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.name)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
    )
    # A strict check (RFC 5280; the default of Python 3.13's clients) requires these extensions.
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
    if signer is None:
        builder = builder.add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
                key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )  # fmt: skip
    else:
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
        builder = builder.add_extension(issued_by, critical=False)
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    certificate = builder.sign(own if signer is None else signer.key, hashes.SHA256())
    file_name = name.replace("/", "_").replace(":", "_") if signer is not None else _CA
    path, key_path = directory / f"{file_name}.pem", directory / f"{file_name}.key"
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(key_path, key, 0o600)
    _replace(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return path


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Replace the file by a rename: a reader opens the old or the new file, never a part of one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
        file.write(data)
    temporary.replace(path)
