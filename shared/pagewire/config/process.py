"""Settings of every process."""

from dataclasses import dataclass
from typing import Literal

from pagewire.config.fields import setting


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Settings of every process: logs, shutdown, metrics and TLS."""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Lowest severity of the messages that are logged."
    )
    log_format: Literal["text", "json"] = setting(
        "text", "How log records are written: one line of text each, or one JSON object each."
    )
    otlp_endpoint: str | None = setting(
        None,
        "Collector of traces, such as http://127.0.0.1:4318, which gets them over OTLP/HTTP. Needs "
        "the extra `otel` of the package. Without a collector there are no traces.",
    )
    trace_ratio: float = setting(
        1.0,
        "Fraction of the requests that are traced, if there is a collector. A request whose client "
        "sends a W3C trace context is traced if its client traces it.",
        minimum=0,
        maximum=1,
    )
    drain_timeout: float = setting(
        30.0, "Seconds that running requests have to finish after SIGTERM.", minimum=0
    )
    metrics_host: str = setting(
        "127.0.0.1", "Address on which Prometheus metrics are served, if they have a port."
    )
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate (chain) of this process. gRPC servers show it, and so do "
        "clients when a server asks for it. A `unix:` address is not encrypted.",
    )
    tls_key: str | None = setting(None, "PEM file with the private key of tls_cert.")
    tls_ca: str | None = setting(
        None,
        "PEM file with the authority that signed the certificates of all processes. With it, gRPC "
        "connections to other processes are encrypted and their certificates are verified, and "
        "servers take only clients with a certificate.",
    )
    tls_verify_clients: bool = setting(
        True, "Ask the clients of this process for a certificate, if tls_ca is given."
    )
    tls_server_name: str | None = setting(
        None, "Name in the certificates of gRPC servers, if it differs from their address."
    )
