"""Settings of a gateway."""

from dataclasses import dataclass

from pagewire.config.fields import metrics_port, setting
from pagewire.config.shared import RequestConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(RequestConfig):
    """Settings of a gateway, the OpenAI-style HTTP service."""

    host: str = setting("127.0.0.1", "Address to listen on for HTTP.")
    port: int = setting(
        8000, "Port to listen on for HTTP; 0 takes a free one.", minimum=0, maximum=65535
    )
    schedulers: str = setting(
        "127.0.0.1:50051",
        "Addresses of the schedulers, separated by commas: host:port, unix:PATH, or file:PATH "
        "for every address in a file, one a line. A DNS name stands for every address that it "
        "resolves to. Names are resolved, and files read, again and again.",
    )
    expected_models: str = setting(
        "",
        "Names of models that schedulers will serve, separated by commas. Until a scheduler does, "
        "requests for such a model get status 503 with Retry-After; a name that is neither served "
        "nor expected gets 404. `pagewire run` gives the names of several models.",
    )
    resume_timeout: float = setting(
        30.0,
        "Seconds that a request waits for a scheduler with a ready worker before it fails. This "
        "holds for new requests and for those that lost their scheduler.",
        minimum=0,
    )
    max_resumes: int = setting(
        3,
        "How many schedulers in a row a request may lose without a new token. After that it runs "
        "alone in a scheduler, and fails if two of those crash too.",
        minimum=1,
    )
    max_json_nodes: int = setting(
        2_000_000,
        "Maximum number of values in the JSON of a request body, counted before it is parsed.",
        minimum=1,
    )
    parser_processes: int = setting(
        2, "Maximum number of helper processes that parse large request bodies.", minimum=1
    )
    https_cert: str | None = setting(
        None,
        "PEM file with the certificate (chain) for HTTP clients. With it the gateway serves HTTPS "
        "instead of HTTP.",
    )
    https_key: str | None = setting(None, "PEM file with the private key of https_cert.")
    cors_origins: str = setting(
        "",
        "Origins whose pages may call the API from a browser, separated by commas, or `*` for "
        "any. None by default.",
    )
    strict_fields: bool = setting(
        False,
        "Refuse requests with fields that are not known, or that the model's chat template does "
        "not render. By default such fields are ignored, and named in the header "
        "`x-pagewire-ignored` of the answer.",
    )
    openapi: bool = setting(
        True, "Serve a description of the HTTP API at /openapi.json, and a page of it at /docs."
    )
    page: bool = setting(
        True, "Serve a web page at `/`: a chat, and a live view of schedulers and workers."
    )
    playground_socket: str | None = setting(
        None,
        "Unix socket of a supervisor that ends workers when the page asks for it. "
        "`pagewire run --playground` sets it.",
    )
    api_metrics: bool = setting(
        True,
        "Serve the gateway's Prometheus metrics at /metrics of the HTTP port, too. A scraper "
        "needs an API key if there are any.",
    )
    gateway_metrics_port: int | None = metrics_port("gateway")
