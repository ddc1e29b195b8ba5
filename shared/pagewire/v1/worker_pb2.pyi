from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Drafter(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_UNSPECIFIED: _ClassVar[Drafter]
    DRAFTER_SUFFIX: _ClassVar[Drafter]
    DRAFTER_PREDICTION: _ClassVar[Drafter]
    DRAFTER_RECENT: _ClassVar[Drafter]
    DRAFTER_GRAMMAR: _ClassVar[Drafter]
    DRAFTER_DRAFT_MODEL: _ClassVar[Drafter]
DRAFTER_UNSPECIFIED: Drafter
DRAFTER_SUFFIX: Drafter
DRAFTER_PREDICTION: Drafter
DRAFTER_RECENT: Drafter
DRAFTER_GRAMMAR: Drafter
DRAFTER_DRAFT_MODEL: Drafter

class WorkerInfo(_message.Message):
    __slots__ = ("model", "block_size", "num_blocks", "num_slots", "max_model_len", "vocab_size", "max_num_batched_tokens", "dtype", "device", "weight_bytes", "kv_cache_bytes", "instance_id", "prefix_groups", "host_blocks", "save_block_seconds", "load_block_seconds", "prefill_token_seconds", "prefill_pair_seconds", "piggyback_tokens", "batch_invariant", "constraints", "max_drafts", "pooling", "window")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVE_BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PIGGYBACK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    model: str
    block_size: int
    num_blocks: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    weight_bytes: int
    kv_cache_bytes: int
    instance_id: str
    prefix_groups: bool
    host_blocks: int
    save_block_seconds: float
    load_block_seconds: float
    prefill_token_seconds: float
    prefill_pair_seconds: float
    piggyback_tokens: int
    batch_invariant: bool
    constraints: bool
    max_drafts: int
    pooling: Pooling
    window: int
    def __init__(self, model: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., instance_id: _Optional[str] = ..., prefix_groups: bool = ..., host_blocks: _Optional[int] = ..., save_block_seconds: _Optional[float] = ..., load_block_seconds: _Optional[float] = ..., prefill_token_seconds: _Optional[float] = ..., prefill_pair_seconds: _Optional[float] = ..., piggyback_tokens: _Optional[int] = ..., batch_invariant: bool = ..., constraints: bool = ..., max_drafts: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., window: _Optional[int] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("task", "size", "activation", "whole_prompt", "pair_format")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    PAIR_FORMAT_FIELD_NUMBER: _ClassVar[int]
    task: str
    size: int
    activation: str
    whole_prompt: bool
    pair_format: str
    def __init__(self, task: _Optional[str] = ..., size: _Optional[int] = ..., activation: _Optional[str] = ..., whole_prompt: bool = ..., pair_format: _Optional[str] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("hello", "step", "trace_end", "claim", "checksum")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRACE_END_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    trace_end: TraceEnd
    claim: Claim
    checksum: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., trace_end: _Optional[_Union[TraceEnd, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class TraceEnd(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "epoch", "scheduler", "shares")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    scheduler: str
    shares: bool
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., scheduler: _Optional[str] = ..., shares: bool = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Standing(_message.Message):
    __slots__ = ("model", "holder", "waiting", "claims")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    model: str
    holder: str
    waiting: _containers.RepeatedScalarFieldContainer[str]
    claims: int
    def __init__(self, model: _Optional[str] = ..., holder: _Optional[str] = ..., waiting: _Optional[_Iterable[str]] = ..., claims: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step", "starts", "append_slots", "append_blocks", "prefill_slots", "prefill_counts", "decode_slots", "group_sizes", "group_blocks", "group_slots", "saved_blocks", "saved_host_blocks", "loaded_host_blocks", "loaded_blocks", "freed_slots", "freed_counts")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_SLOTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZES_FIELD_NUMBER: _ClassVar[int]
    GROUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    starts: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    append_slots: bytes
    append_blocks: bytes
    prefill_slots: bytes
    prefill_counts: bytes
    decode_slots: bytes
    group_sizes: bytes
    group_blocks: bytes
    group_slots: bytes
    saved_blocks: bytes
    saved_host_blocks: bytes
    loaded_host_blocks: bytes
    loaded_blocks: bytes
    freed_slots: bytes
    freed_counts: bytes
    def __init__(self, step: _Optional[int] = ..., starts: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., append_slots: _Optional[bytes] = ..., append_blocks: _Optional[bytes] = ..., prefill_slots: _Optional[bytes] = ..., prefill_counts: _Optional[bytes] = ..., decode_slots: _Optional[bytes] = ..., group_sizes: _Optional[bytes] = ..., group_blocks: _Optional[bytes] = ..., group_slots: _Optional[bytes] = ..., saved_blocks: _Optional[bytes] = ..., saved_host_blocks: _Optional[bytes] = ..., loaded_host_blocks: _Optional[bytes] = ..., loaded_blocks: _Optional[bytes] = ..., freed_slots: _Optional[bytes] = ..., freed_counts: _Optional[bytes] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("slot", "token_ids", "num_generated", "num_computed", "blocks", "sampling", "copied_block", "constraint", "prompt_logprobs", "first_prompt_logprob", "max_new_tokens", "end_token_ids", "traceparent", "prediction", "cache_salt")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCK_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PROMPT_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token_ids: bytes
    num_generated: int
    num_computed: int
    blocks: bytes
    sampling: SlotSampling
    copied_block: int
    constraint: Constraint
    prompt_logprobs: int
    first_prompt_logprob: int
    max_new_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    prediction: bytes
    cache_salt: str
    def __init__(self, slot: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_generated: _Optional[int] = ..., num_computed: _Optional[int] = ..., blocks: _Optional[bytes] = ..., sampling: _Optional[_Union[SlotSampling, _Mapping]] = ..., copied_block: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., first_prompt_logprob: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., prediction: _Optional[bytes] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("grammar", "begin_after", "end_token_ids", "min_tokens", "allowed_token_ids", "banned_token_ids", "banned_lengths", "max_reasoning_tokens", "reasoning_begin", "reasoning_end", "reasoning_end_ids", "grammar_field")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BEGIN_AFTER_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MAX_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_BEGIN_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    begin_after: str
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    allowed_token_ids: bytes
    banned_token_ids: bytes
    banned_lengths: bytes
    max_reasoning_tokens: int
    reasoning_begin: str
    reasoning_end: str
    reasoning_end_ids: bytes
    grammar_field: str
    def __init__(self, grammar: _Optional[str] = ..., begin_after: _Optional[str] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., allowed_token_ids: _Optional[bytes] = ..., banned_token_ids: _Optional[bytes] = ..., banned_lengths: _Optional[bytes] = ..., max_reasoning_tokens: _Optional[int] = ..., reasoning_begin: _Optional[str] = ..., reasoning_end: _Optional[str] = ..., reasoning_end_ids: _Optional[bytes] = ..., grammar_field: _Optional[str] = ...) -> None: ...

class SlotSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "stop_token_ids", "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids", "biases")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: bytes
    biases: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_ids: _Optional[bytes] = ..., biases: _Optional[bytes] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("ready", "result", "alive", "standing", "checksum")
    READY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ready: WorkerInfo
    result: StepResult
    alive: Alive
    standing: Standing
    checksum: int
    def __init__(self, ready: _Optional[_Union[WorkerInfo, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("received_steps",)
    RECEIVED_STEPS_FIELD_NUMBER: _ClassVar[int]
    received_steps: int
    def __init__(self, received_steps: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "token_ids", "errors", "duration_us", "logprob_rows", "logprobs", "top_ids", "top_logprobs", "prompt_logprobs", "token_counts", "draft_rows", "draft_counts", "drafters", "pooled")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    step: int
    token_ids: bytes
    errors: _containers.RepeatedCompositeFieldContainer[SlotError]
    duration_us: int
    logprob_rows: bytes
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    prompt_logprobs: PromptLogprobs
    token_counts: bytes
    draft_rows: bytes
    draft_counts: bytes
    drafters: bytes
    pooled: bytes
    def __init__(self, step: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., errors: _Optional[_Iterable[_Union[SlotError, _Mapping]]] = ..., duration_us: _Optional[int] = ..., logprob_rows: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., token_counts: _Optional[bytes] = ..., draft_rows: _Optional[bytes] = ..., draft_counts: _Optional[bytes] = ..., drafters: _Optional[bytes] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("slots", "begins", "counts", "logprobs", "ranks", "top_ids", "top_logprobs")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    begins: bytes
    counts: bytes
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, slots: _Optional[bytes] = ..., begins: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class SlotError(_message.Message):
    __slots__ = ("slot", "message", "retryable", "field")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    slot: int
    message: str
    retryable: bool
    field: str
    def __init__(self, slot: _Optional[int] = ..., message: _Optional[str] = ..., retryable: bool = ..., field: _Optional[str] = ...) -> None: ...
