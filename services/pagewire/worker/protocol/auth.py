"""Who may send a worker its steps."""

from pagewire.addresses import is_local
from pagewire.config import ProcessConfig
from pagewire.rpc.credentials import WORKER_TOKEN, Credentials, read_token


def worker_credentials(config: ProcessConfig, token_file: str | None, address: str) -> Credentials:
    """What a worker that listens on `address` asks of schedulers.

    ValueError where strangers could reach it: whoever may send steps reads and writes the KV cache
    of everybody's prompts. OSError or ValueError for files that are no use.
    """
    credentials = Credentials.of(config).with_token(read_token(token_file, WORKER_TOKEN))
    if not is_local(address) and not credentials.authenticates_clients:
        raise ValueError(
            f"{address} is open to other machines; set {WORKER_TOKEN} (or --worker-token-file) "
            "here and at the schedulers, or give --tls-cert, --tls-key and --tls-ca"
        )
    return credentials
