"""Certificates for tests, made by openssl: who signs, who is signed, who is not."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(root, days=2):
    """Paths in `root`: `ca`, `other-ca`, `node`, `billing`, `stranger` (signed by the other), `expired` and `elsewhere`
    (of another host); `.pem` and `.key` of each.
    """
    if shutil.which("openssl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("openssl makes the certificates; it is not installed")
    for ca in ("ca", "other-ca"):
        made = ("-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}", "-days", str(days))
        _openssl(root, "req", "-x509", *CURVE, *made)
    (root / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    (root / "client-names").write_text("subjectAltName=URI:billing")
    (root / "other-names").write_text("subjectAltName=DNS:elsewhere.example")
    sign(root, "node", days)
    sign(root, "billing", days, names="client-names")
    sign(root, "stranger", days, ca="other-ca")
    sign(root, "expired", -1)
    sign(root, "elsewhere", days, names="other-names")
    return root


def trial_certificates(directory, names, days=30):
    """Those of examples/certificates.sh: an authority, if there is none, and for each name `.pem` and `.key`."""
    script = Path(__file__).parents[2] / "examples" / "certificates.sh"
    subprocess.run(
        [script, directory, *names], env=os.environ | {"DAYS": str(days)}, check=True, capture_output=True, text=True
    )


def sign(root, name, days, *, ca="ca", names="names"):
    """A certificate valid for so many days, for the existing key of `name` or a new one. It is replaced atomically."""
    if not (root / f"{name}.csr").exists():
        _openssl(root, "req", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", names)
    _openssl(root, "x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.new", "-days", str(days))
    (root / f"{name}.new").replace(root / f"{name}.pem")


def _openssl(root, *arguments):
    subprocess.run(["openssl", *arguments], cwd=root, check=True, capture_output=True)
