"""Certificates that cannot be used are refused with the setting, the file and the remedy."""

import subprocess
from pathlib import Path

import pytest

from pagewire.config import ProcessConfig
from pagewire.rpc.certificates import check_pair, tls_problem
from pagewire.rpc.credentials import Credentials, read_token
from support.processes.certificates import Authority


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A certificate with its key, plain and encrypted, the key of another, and an empty file."""
    authority = Authority(tmp_path / "authority")
    own = authority.identity("pagewire")
    for file in ("encrypted", "empty"):
        (tmp_path / file).touch()
    encrypted = str(tmp_path / "encrypted")
    subprocess.run(
        ["openssl", "ec", "-in", own.key, "-aes128", "-passout", "pass:secret", "-out", encrypted],
        check=True,
        capture_output=True,
    )
    return {
        "cert": own.cert,
        "key": own.key,
        "encrypted": encrypted,
        "other": authority.identity("other").key,
        "empty": str(tmp_path / "empty"),
        "missing": str(tmp_path / "missing"),
    }


@pytest.mark.parametrize("name", ["tls", "https"])
@pytest.mark.parametrize(
    ("cert", "key", "problem"),
    [
        ("missing", "key", r"{name}_cert .*missing cannot be read: No such file"),
        ("cert", "missing", r"{name}_key .*missing cannot be read: No such file"),
        ("cert", "other", r"{name}_key .*other.key is not the key of {name}_cert .*pem; give"),
        ("cert", "encrypted", r"{name}_key .*encrypted is encrypted; `openssl pkey"),
        ("empty", "empty", r"{name}_cert .*empty and .* in PEM: one of them holds neither"),
    ],
)
def test_a_pair_that_cannot_be_used_is_refused_with_its_settings(
    files: dict[str, str], name: str, cert: str, key: str, problem: str
) -> None:
    with pytest.raises((OSError, ValueError), match=problem.format(name=name)):
        check_pair(name, files[cert], files[key])
    if name == "tls":
        with pytest.raises((OSError, ValueError), match=problem.format(name=name)):
            Credentials.of(ProcessConfig(tls_cert=files[cert], tls_key=files[key]))


def test_an_authority_without_a_certificate_is_refused(files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"tls_ca .*empty has no certificate in PEM"):
        Credentials.of(ProcessConfig(tls_ca=files["empty"]))
    with pytest.raises(OSError, match=r"tls_ca .*missing cannot be read"):
        Credentials.of(ProcessConfig(tls_ca=files["missing"]))


def test_a_certificate_with_its_key_is_read(files: dict[str, str]) -> None:
    identity = {"tls_cert": files["cert"], "tls_key": files["key"], "tls_ca": files["cert"]}
    assert Credentials.of(ProcessConfig(**identity)).certificate
    check_pair("https", None, None)


def test_a_token_file_that_is_not_text_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match=f"the token of {file} must have"):
        read_token(str(file), "PAGEWIRE_WORKER_TOKEN")


@pytest.mark.parametrize(
    ("details", "problem"),
    [
        (
            "last error: UNKNOWN: ipv4:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): "
            "CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "its certificate is not accepted, certificate has expired; tls_ca here",
        ),
        ("UNAUTHENTICATED: Hostname Verification Check failed.", "set tls_server_name to"),
        ("Tls handshake failed: WRONG_VERSION_NUMBER: x: OK", "it does not use TLS; give it"),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:1: Socket closed",
            "if it uses TLS, set tls_ca here",
        ),
        ("Socket closed", None),  # a connection that was in use
        ("last error: UNKNOWN: ipv4:1: connect: Connection refused", None),
    ],
)
def test_a_problem_of_certificates_is_found_in_details(details: str, problem: str | None) -> None:
    found = tls_problem(details)
    assert found is None if problem is None else problem in str(found)
