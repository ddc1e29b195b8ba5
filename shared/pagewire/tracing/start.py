"""Starts tracing, if an endpoint is set."""

from typing import TYPE_CHECKING

from pagewire.config import ProcessConfig

if TYPE_CHECKING:
    from pagewire.tracing.otel import Tracing


def start_tracing(config: ProcessConfig, service: str) -> "Tracing | None":
    """The source of this process's spans; None without an endpoint to send them to.

    ValueError if the packages of the extra `otel` are not installed.
    """
    if not config.otlp_endpoint:  # an environment variable may be empty
        return None
    try:
        from pagewire.tracing.otel import Tracing
    except ImportError as error:
        raise ValueError(
            f"otlp_endpoint is {config.otlp_endpoint!r}, which needs the package {error.name}: "
            "install the extra `otel`, pip install -e '.[otel]' in the repository, or leave it out"
        ) from error
    return Tracing(service, config.otlp_endpoint, config.trace_ratio)
