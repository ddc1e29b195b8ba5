"""How the processes of one Pagewire know each other: certificates, and shared tokens.

Both hold for TCP addresses only. A `unix:PATH` is on this machine, guarded by the permissions of
its folder: it is neither encrypted nor verified, and only a token is asked for.
"""

import hmac
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagewire.config import ProcessConfig

# Tokens are no settings: a flag would show them to everybody on the machine.
SCHEDULER_TOKEN = "PAGEWIRE_SCHEDULER_TOKEN"
WORKER_TOKEN = "PAGEWIRE_WORKER_TOKEN"
# Shorter secrets can be guessed.
SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process shows to others and what it asks of them; nothing by default.

    `certificate` and `key` are PEM, shown by servers and, where they are asked, by clients.
    `authority` is PEM: clients encrypt and trust servers that it signed; servers with
    `verify_clients` take clients only that it signed. `token` is shown in a call's metadata by
    clients and asked for by servers.
    """

    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    authority: bytes | None = None
    verify_clients: bool = True
    # The name in a server's certificate, where that is not its address.
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: ProcessConfig) -> "Credentials":
        """The certificates that a configuration names. OSError or ValueError if they are no use."""
        if (config.tls_cert is None) != (config.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; give both or neither")
        return cls(
            certificate=_read(config.tls_cert),
            key=_read(config.tls_key),
            authority=_read(config.tls_ca),
            verify_clients=config.tls_verify_clients,
            server_name=config.tls_server_name,
        )

    def with_token(self, token: str | None) -> "Credentials":
        """The same with a token."""
        return replace(self, token=token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client's calls carry."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def refuses_strangers(self) -> bool:
        """Whether a server with these takes nobody without a secret."""
        mutual = self.certificate is not None and self.authority is not None
        return self.token is not None or (mutual and self.verify_clients)

    def accepts(self, shown: str | bytes) -> bool:
        """Whether the `authorization` of a call is the token, compared in constant time."""
        given = shown.encode() if isinstance(shown, str) else shown
        return self.token is not None and hmac.compare_digest(
            given, f"Bearer {self.token}".encode()
        )


NO_CREDENTIALS = Credentials()


def read_token(file: str | None, variable: str) -> str | None:
    """The token in a file, or else in an environment variable; None where neither is given.

    OSError or ValueError say what is wrong.
    """
    where = file or variable
    token = Path(file).read_text() if file else os.environ.get(variable, "")
    token = token.strip()
    if not token and not file:
        return None
    if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the token of {where} must have at least {SHORTEST_TOKEN} characters, all of them "
            "printable ASCII; `openssl rand -hex 32` makes one"
        )
    return token


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
