"""Authorities and certificates for tests, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the openssl command is not installed"
)


class Authority:
    """An authority with its key, which signs certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.certificate, self.key = folder / f"{name}.crt", folder / f"{name}.key"
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", "30", "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.certificate,
        )  # fmt: skip

    def sign(self, name: str, alternative: str = "IP:127.0.0.1,DNS:localhost") -> tuple[Path, Path]:
        """Return the files of a new certificate and its key."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        request, extra = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extra.write_text(f"subjectAltName={alternative}\n")
        _openssl(
            "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-subj", f"/CN={name}", "-keyout", key, "-out", request,
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.key,
            "-CAcreateserial", "-days", "30", "-extfile", extra, "-out", certificate,
        )  # fmt: skip
        return certificate, key

    def revoke(self, *certificates: Path) -> str:
        """Return a list, in PEM format, of certificates that the authority has revoked."""
        config, index = self.folder / "revoking.cnf", self.folder / "index"
        index.touch()
        config.write_text(
            f"[ca]\ndefault_ca = own\n[own]\ndatabase = {index}\ndefault_md = sha256\n"
            f"default_crl_days = 30\ncertificate = {self.certificate}\nprivate_key = {self.key}\n"
        )
        for certificate in certificates:
            _openssl("ca", "-config", config, "-revoke", certificate)
        found = self.folder / "revoked.crl"
        _openssl("ca", "-config", config, "-gencrl", "-out", found)
        return found.read_text()


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
