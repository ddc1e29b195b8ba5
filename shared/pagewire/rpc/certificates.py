"""Checks of certificate files before a server uses them, with errors that name setting and file.

gRPC itself accepts unusable files: a server then reports a wrong address, and a client never
connects.
"""

import ssl
from pathlib import Path

from pagewire.config import ProcessConfig


def read_setting(setting: str, path: str) -> bytes:
    """The content of the file that a setting names; OSError names both."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OSError(f"{setting} {path} cannot be read: {error.strerror}") from error


def check_pair(name: str, certificate: str | None, key: str | None) -> None:
    """Checks the files of `NAME_cert` and `NAME_key`; does nothing without them.

    ValueError or OSError if one is missing, or if they do not belong together.
    """
    cert_setting, key_setting = f"{name}_cert", f"{name}_key"
    if (certificate is None) != (key is None):
        raise ValueError(f"{cert_setting} and {key_setting} belong together; give both or neither")
    if certificate is None or key is None:
        return
    read_setting(cert_setting, certificate)
    read_setting(key_setting, key)

    def refuse_password() -> str:
        # Without this, OpenSSL would ask at the terminal and wait.
        raise ValueError(
            f"{key_setting} {key} is encrypted; `openssl pkey -in {key} -out FILE` writes it "
            "without a password"
        )

    try:
        _context(for_grpc=name == "tls").load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"{key_setting} {key} is not the key of {cert_setting} {certificate}; give the "
                "key with which this certificate was made"
            ) from error
        raise ValueError(
            f"{cert_setting} {certificate} and {key_setting} {key} are not a certificate with its "
            f"key in PEM: {error.reason or 'one of them holds neither'}"
        ) from error


def check_tls(config: ProcessConfig) -> None:
    """Checks the files of `tls_cert`, `tls_key` and `tls_ca`; ValueError or OSError if they cannot
    be used."""
    check_pair("tls", config.tls_cert, config.tls_key)
    if config.tls_ca is not None:
        read_setting("tls_ca", config.tls_ca)
        try:
            _context(for_grpc=True).load_verify_locations(config.tls_ca)
        except ssl.SSLError as error:
            raise ValueError(f"tls_ca {config.tls_ca} has no certificate in PEM") from error


def _context(for_grpc: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if for_grpc:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # gRPC accepts short keys
    return context


def tls_problem(details: str) -> str | None:
    """What is wrong with the use of TLS, from gRPC's details of a connection that failed.

    None if TLS is not the cause.
    """
    if "failed to connect" in details and details.endswith("Socket closed"):
        return (
            "it closes connections before it answers; if it uses TLS, set tls_ca here, and "
            "tls_cert and tls_key if it verifies clients"
        )
    if "Hostname Verification Check failed" in details:
        return "its certificate has another name; set tls_server_name to a name in it"
    if "Tls handshake failed" not in details:
        return None
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not use TLS; give it tls_cert and tls_key, or leave tls_ca out here"
    reason = details.removesuffix(": OK").rpartition(":")[2].strip()
    return f"its certificate is not accepted, {reason}; tls_ca here must have signed tls_cert there"
