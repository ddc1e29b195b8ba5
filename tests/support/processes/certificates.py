"""Certificates for tests, made with the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Identity:
    """A certificate with its key, and the authority that signed it."""

    cert: str
    key: str
    ca: str

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a process that uses this certificate."""
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}


class Authority:
    """Signs certificates for a name and 127.0.0.1; skips the test if openssl is missing."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl, which makes certificates, is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = str(folder / "ca.pem")
        self._key = str(folder / "ca.key")
        self._run("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.ca)

    def identity(self, name: str) -> Identity:
        """A certificate for a name and 127.0.0.1."""
        cert, key = (str(self._folder / f"{name}.{kind}") for kind in ("pem", "key"))
        extension = self._folder / f"{name}.ext"
        extension.write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1\n")
        request = str(self._folder / f"{name}.csr")
        self._run("req", *_NEW_KEY, "-keyout", key, "-out", request)
        self._run(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key),
            *("-CAcreateserial", "-days", "2", "-out", cert, "-extfile", str(extension)),
        )
        return Identity(cert, key, self.ca)

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x")
