"""Certificates for tests, made by openssl: who signs, who is signed, who is not."""

import os
import shutil
import subprocess

import pytest


def make_certificates(root):
    """Paths in `root`: `ca`, `other-ca`, `node`, `billing`, `stranger` (signed by the other), `expired` and `elsewhere`
    (of another host); `.pem` and `.key` of each.
    """
    if shutil.which("openssl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("openssl makes the certificates; it is not installed")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=root, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("ca", "other-ca"):
        openssl("req", "-x509", *curve, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}", "-days", "2")
    (root / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    (root / "client-names").write_text("subjectAltName=URI:billing")
    (root / "other-names").write_text("subjectAltName=DNS:elsewhere.example")
    for name, ca, days, names in (
        ("node", "ca", "2", "names"),
        ("billing", "ca", "2", "client-names"),
        ("stranger", "other-ca", "2", "names"),
        ("expired", "ca", "-1", "names"),
        ("elsewhere", "ca", "2", "other-names"),
    ):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", names)
        openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-out", f"{name}.pem", "-days", days)
    return root
