"""Settings that two or more services have."""

from dataclasses import dataclass

from pagewire.config.fields import metrics_port, setting
from pagewire.config.process import ProcessConfig
from pagewire.limits import INT32_MAX


@dataclass(frozen=True, kw_only=True)
class RequestConfig(ProcessConfig):
    """Settings of the services that accept clients' requests: gateways over HTTP, schedulers over
    gRPC."""

    api_keys_file: str | None = setting(
        None,
        "YAML or JSON list of API keys, as `pagewire keys new` prints them; read again on SIGHUP. "
        "The environment variable PAGEWIRE_API_KEYS may hold further keys, separated by commas. "
        "Without any key, requests need none.",
    )
    scheduler_token_file: str | None = setting(
        None,
        "File with the token that a scheduler requires from its gateways, and from gRPC clients "
        "if there are no API keys. By default the environment variable PAGEWIRE_SCHEDULER_TOKEN.",
    )
    max_body_bytes: int = setting(
        16 << 20,
        "Largest request body in bytes. At a scheduler: the largest message of a call with an API "
        "key.",
        minimum=1,
        maximum=INT32_MAX,
    )
    max_open_requests: int | None = setting(
        None,
        "Maximum number of generating requests that are open at once; further ones are refused "
        "(HTTP 429). At a scheduler this counts calls with an API key. By default 8192; a gateway "
        "lowers it to what its limit of open files allows.",
        minimum=1,
    )
    max_open_body_bytes: int = setting(
        1 << 30,
        "Maximum bytes of the bodies of all generating requests that are open at once; further "
        "requests are refused (HTTP 429). At a scheduler this counts calls with an API key.",
        minimum=1,
    )
    parse_timeout: float = setting(
        30.0,
        "Seconds that a helper process may take to parse, render and tokenize one large request.",
        minimum=0.1,
    )
    max_messages: int = setting(4096, "Maximum number of messages in a conversation.", minimum=1)
    max_template_bytes: int = setting(
        1 << 16, "Maximum bytes of the JSON of chat_template_kwargs.", minimum=1
    )
    max_prompt_logprobs: int = setting(
        1 << 19,
        "Maximum number of log probabilities of prompts (`prompt_logprobs`, or `echo` with "
        "`logprobs`): a token has its own, and those of the likeliest tokens that the request "
        "wants. A scheduler counts them for each prompt, a gateway for all choices of an answer.",
        minimum=1,
    )
    max_template_nodes: int = setting(
        4096, "Maximum number of values in chat_template_kwargs, nested ones included.", minimum=1
    )
    max_tools: int = setting(512, "Maximum number of tools in a request.", minimum=0)
    max_tool_bytes: int = setting(
        1 << 20,
        "Maximum bytes of the JSON of a request's tools, and of the calls in it.",
        minimum=1,
    )
    max_tool_nodes: int = setting(
        1 << 16, "Maximum number of values in a request's tools, and in the calls in it.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ProcessConfig):
    """Settings of the services that run the model's steps: schedulers, workers and simulated
    workers."""

    model: str = setting(
        "embedded",
        "Model folder in Hugging Face format, a model of the hub as org/name or org/name@revision, "
        "which is downloaded unless it is in the hub's cache, or `embedded` for the small chat "
        "model that comes with Pagewire. A scheduler reads only its tokenizer and chat template, "
        "a simulated worker only its config.json.",
    )
    served_model_name: str | None = setting(
        None,
        "Name of the model in requests; by default its hub id, org/name, or the last part of its "
        "path.",
    )
    worker_token_file: str | None = setting(
        None,
        "File with the token that workers require from their schedulers. By default the "
        "environment variable PAGEWIRE_WORKER_TOKEN.",
    )
    step_timeout: float = setting(
        60.0,
        "Seconds that a worker has for one step. After that a scheduler counts the worker as lost "
        "and runs its requests on others. The worker reports itself unhealthy, and exits when the "
        "step has taken twice as long.",
        minimum=0.1,
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(ProcessConfig):
    """Settings of the services that read the tokenizer: schedulers, and workers for structured
    output."""

    tokenizer: str | None = setting(
        None,
        "Folder or hub id of the tokenizer and chat template, if they are not those of the model.",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerLimitsConfig(ModelConfig):
    """Settings of workers and simulated workers: the address, and the limits that they announce to
    schedulers."""

    worker_address: str = setting(
        "127.0.0.1:50061", "Address to listen on for gRPC: host:port or unix:PATH."
    )
    block_size: int = setting(
        16, "Tokens in a KV block. The triton kernels need a multiple of 16.", minimum=1
    )
    num_blocks: int | None = setting(
        None,
        "KV blocks in the pool. By default as many as the device's free memory holds; for a "
        "simulated worker, as many as its profile's memory holds.",
        minimum=2,
        maximum=INT32_MAX,
    )
    host_memory_gb: float = setting(
        0.0,
        "Gigabytes of host memory, pinned on a GPU, for KV that the device has no room for. KV of "
        "preempted and finished requests is kept there, and copied back where that is faster than "
        "computing it again. 0 turns this off.",
        minimum=0,
        maximum=1 << 16,
    )
    num_slots: int = setting(
        256, "Maximum number of sequences that run at once.", minimum=1, maximum=1 << 16
    )
    # A sequence has a prompt and at least one token of output.
    max_model_len: int | None = setting(
        None,
        "Maximum number of tokens in a sequence; by default the limit in config.json.",
        minimum=2,
        maximum=INT32_MAX,
    )
    worker_max_num_batched_tokens: int | None = setting(
        None,
        "Maximum number of tokens computed in one step. By default 8192 on a GPU, up to 16384 for "
        "a model with many experts, 2048 on a CPU, and the profile's number for a simulated "
        "worker.",
        minimum=1,
        maximum=1 << 20,
    )
    worker_metrics_port: int | None = metrics_port("worker")
