"""API keys and credentials of the scheduler's gRPC port."""

import os
from functools import partial

import grpc

from pagewire.addresses import is_local
from pagewire.auth.callers import Callers
from pagewire.auth.keys import KEYS_VARIABLE, read_keys
from pagewire.config import SchedulerConfig
from pagewire.rpc.credentials import SCHEDULER_TOKEN, Credentials, read_token
from pagewire.rpc.key_interceptor import KeyInterceptor, KeyRules
from pagewire.rpc.protocol import MAX_CLIENT_MESSAGE_BYTES
from pagewire.rpc.transport import make_server
from pagewire.scheduler.service import RawRequests

SERVICE_NAME = "pagewire.v1.Inference"
_MAX_CALLS = 8192


def read_callers(config: SchedulerConfig) -> Callers:
    """The API keys of file or environment; OSError or ValueError if they are invalid."""
    # Keys are not a setting: every user of the machine can read a flag.
    return Callers(partial(read_keys, config.api_keys_file, os.environ.get(KEYS_VARIABLE, "")))


def public_credentials(config: SchedulerConfig, address: str, have_keys: bool) -> Credentials:
    """The credentials of a scheduler that listens on `address`; limits do not apply to gateways.

    Raises ValueError if it has keys and other machines can reach it, but it cannot tell a gateway
    from any other client without a key; OSError or ValueError for invalid files.
    """
    token = read_token(config.scheduler_token_file, SCHEDULER_TOKEN)
    credentials = Credentials.of(config).with_token(token)
    if have_keys and not is_local(address) and not credentials.authenticates_clients:
        raise ValueError(
            f"{address} is open to other machines and has API keys, and gateways have no key; set "
            f"{SCHEDULER_TOKEN} (or --scheduler-token-file) here and at the gateways, or give "
            "--tls-cert, --tls-key and --tls-ca"
        )
    return credentials


def public_server(
    config: SchedulerConfig, credentials: Credentials, callers: Callers
) -> grpc.aio.Server:
    """The gRPC server of the public service; the caller adds the service to it."""
    keys = None
    if callers.have_keys:
        keys = KeyInterceptor(callers, credentials, _key_rules(config))
    return make_server(credentials, keys, [RawRequests()], MAX_CLIENT_MESSAGE_BYTES)


def _key_rules(config: SchedulerConfig) -> KeyRules:
    return KeyRules(
        generating=_methods("Generate", "Pool"),
        counted=_methods("Tokenize", "Detokenize"),
        peers_only=_methods("GetLoad", "GetSnapshot", "Multiplex"),
        max_calls=config.max_open_requests or _MAX_CALLS,
        max_message_bytes=config.max_body_bytes,
        max_open_bytes=max(config.max_open_body_bytes, config.max_body_bytes),
    )


def _methods(*names: str) -> frozenset[str]:
    return frozenset(f"/{SERVICE_NAME}/{name}" for name in names)
