"""Certificates for tests, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest


class Authority:
    """A private certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl makes the certificates, and is not installed")
        self.folder = folder
        folder.mkdir(parents=True)
        self.certificate = folder / "ca.pem"
        self._key = folder / "ca.key"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", self._key, "-out", self.certificate, "-days", "2", "-subj", "/CN=test ca"),
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """Return the files of a certificate for `name`, and of its key."""
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=DNS:{name}\n")
        self._openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", key, "-out", request, "-subj", f"/CN={name}"),
        )
        self._openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", certificate),
        )
        return certificate, key

    def _openssl(self, *arguments: object) -> None:
        subprocess.run(
            ["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60
        )
