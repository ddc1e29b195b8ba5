"""The scheduler's Prometheus metrics."""

from prometheus_client import Counter, Gauge, Histogram

from pagewire.lifecycle import draft_counter
from pagewire.lifecycle.metrics import REQUEST_SECONDS, TOKEN_SECONDS, StepCounter, StepHistogram

REQUESTS = Counter("pagewire_scheduler_requests", "Requests that ended, by state.", ["state"])
HANDED_BACK_REASON = "handed_back"
FINISHED = Counter(
    "pagewire_scheduler_finished_requests",
    "Accepted requests that ended, by reason: stop, length, abort, error, or handed_back, which "
    "means that their gateways continue them elsewhere.",
    ["reason"],
)
OPEN_REQUESTS = Gauge(
    "pagewire_scheduler_open_requests", "Requests that have not ended, by state.", ["state"]
)
BLOCKS = Gauge("pagewire_scheduler_blocks", "KV blocks of all workers.", ["state"])
HOST_BLOCKS = Gauge(
    "pagewire_scheduler_host_blocks", "KV blocks in the host memory of all workers.", ["state"]
)
SAVED_BLOCKS = Counter(
    "pagewire_scheduler_saved_blocks", "KV blocks copied from a device to its host's memory."
)
LOADED_BLOCKS = Counter(
    "pagewire_scheduler_loaded_blocks", "KV blocks copied from the host's memory to a device."
)
KV_WASTE = Gauge(
    "pagewire_scheduler_kv_waste",
    "Fraction of the token places in used KV blocks that hold no known token.",
)
READY_WORKERS = Gauge("pagewire_scheduler_ready_workers", "Workers connected and ready.")
PROMPT_TOKENS = Counter("pagewire_scheduler_prompt_tokens", "Prompt tokens of admitted requests.")
CACHED_TOKENS = Counter(
    "pagewire_scheduler_cached_tokens", "Prompt tokens whose KV was taken from the prefix cache."
)
OUTPUT_TOKENS = StepCounter("pagewire_scheduler_output_tokens", "Tokens received from workers.")
DRAFTS = Counter("pagewire_scheduler_drafts", draft_counter.MEANING, draft_counter.LABELS)
DRAFTED = draft_counter.DraftCounter(DRAFTS)
PREEMPTIONS = Counter("pagewire_scheduler_preemptions", "Sequences that gave their blocks back.")
RETURNS = Counter(
    "pagewire_scheduler_preempted_returns",
    "Preempted sequences that run again, by where most of their KV came from: kept on the device, "
    "swapped in from the host, or recomputed.",
    ["kind"],
)
HANDED_BACK = Counter(
    "pagewire_scheduler_handed_back",
    "Requests given back to their gateways, which continue them elsewhere.",
)
WORKER_LOSSES = Counter("pagewire_scheduler_worker_losses", "Connections to workers that broke.")
WORKER_CLAIMS = Counter(
    "pagewire_scheduler_worker_claims", "Claims of workers that schedulers share."
)
WORKER_RELEASES = Counter(
    "pagewire_scheduler_worker_releases",
    "Workers given up for another scheduler's share.",
)
QUEUE_SECONDS = Histogram(
    "pagewire_scheduler_queue_seconds",
    "Seconds from the arrival of a request to its first admission.",
    buckets=REQUEST_SECONDS,
)
FIRST_TOKEN_SECONDS = Histogram(
    "pagewire_scheduler_first_token_seconds",
    "Seconds from the arrival of a request to its first token.",
    buckets=REQUEST_SECONDS,
)
STEP_SECONDS = StepHistogram(
    "pagewire_scheduler_worker_step_seconds",
    "Seconds that a worker took to compute a step.",
    TOKEN_SECONDS,
)


def total(counter: Counter | StepCounter) -> int:
    """The count of a counter without labels since the process began."""
    [family] = counter.collect()
    return int(next(s.value for s in family.samples if s.name.endswith("_total")))
