"""How Pagewire's processes authenticate each other: by certificates and shared tokens.

Certificates are used on TCP addresses only. A `unix:PATH` is protected by the permissions of its
folder; a token is required there too.
"""

import hmac
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagewire.config import ProcessConfig
from pagewire.rpc.certificates import check_tls

# Environment variables. A flag would show the token to every user of the machine.
SCHEDULER_TOKEN = "PAGEWIRE_SCHEDULER_TOKEN"
WORKER_TOKEN = "PAGEWIRE_WORKER_TOKEN"
# In characters. Shorter secrets could be guessed.
MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets that a process presents to others and requires from them; none by default.

    Servers present `certificate` with its private `key` (PEM); clients do so if the server asks.
    With an `authority` (PEM), clients encrypt and accept only servers that it signed; servers with
    `verify_clients` accept only clients that it signed. Clients send the `token` in the metadata of
    each call, and servers require it.
    """

    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authority: bytes | None = None
    verify_clients: bool = True
    # The name in the certificates of servers, if it differs from their address.
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: ProcessConfig) -> "Credentials":
        """Reads the certificates that a configuration names; OSError or ValueError if they cannot
        be used."""
        check_tls(config)
        return cls(
            certificate=_read(config.tls_cert),
            key=_read(config.tls_key),
            authority=_read(config.tls_ca),
            verify_clients=config.tls_verify_clients,
            server_name=config.tls_server_name,
        )

    def with_token(self, token: str | None) -> "Credentials":
        """The same credentials with this token."""
        return replace(self, token=token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata for a client's calls."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def authenticates_clients(self) -> bool:
        """Whether a server with these credentials accepts no client without a secret."""
        mutual = self.certificate is not None and self.authority is not None
        return self.token is not None or (mutual and self.verify_clients)

    def accepts(self, shown: str | bytes) -> bool:
        """Whether the `authorization` of a call holds the token, compared in constant time."""
        given = shown.encode() if isinstance(shown, str) else shown
        return self.token is not None and hmac.compare_digest(
            given, f"Bearer {self.token}".encode()
        )


NO_CREDENTIALS = Credentials()


def read_token(file: str | None, variable: str) -> str | None:
    """The token in a file, else in an environment variable; None if neither is given.

    ValueError if the file cannot be read or the token cannot be used.
    """
    where = file or variable
    try:
        token = Path(file).read_text() if file else os.environ.get(variable, "")
    except OSError as error:
        raise ValueError(f"the token file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        token = ""  # refused below, without a part of it in the message
    token = token.strip()
    if not token and not file:
        return None
    if len(token) < MIN_TOKEN_LENGTH or not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the token of {where} must have at least {MIN_TOKEN_LENGTH} characters, all of them "
            "printable ASCII; `openssl rand -hex 32` makes one"
        )
    return token


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
