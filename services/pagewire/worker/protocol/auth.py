"""The credentials that a worker requires of schedulers."""

from pagewire.addresses import is_local
from pagewire.config import ProcessConfig
from pagewire.rpc.credentials import WORKER_TOKEN, Credentials, read_token


def worker_credentials(config: ProcessConfig, token_file: str | None, address: str) -> Credentials:
    """The credentials that a worker on `address` requires of schedulers.

    A client that may send steps can read and write the KV cache of all prompts.

    Raises:
        ValueError: other machines can reach the address and no credentials are set, or a file has
            the wrong content.
        OSError: a file cannot be read.
    """
    credentials = Credentials.of(config).with_token(read_token(token_file, WORKER_TOKEN))
    if not is_local(address) and not credentials.authenticates_clients:
        raise ValueError(
            f"{address} is open to other machines; set {WORKER_TOKEN} (or --worker-token-file) "
            "here and at the schedulers, or give --tls-cert, --tls-key and --tls-ca"
        )
    return credentials
