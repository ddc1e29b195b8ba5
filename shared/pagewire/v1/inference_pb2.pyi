from google.protobuf import struct_pb2 as _struct_pb2
from pagewire.v1 import snapshot_pb2 as _snapshot_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolingTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TASK_UNSPECIFIED: _ClassVar[PoolingTask]
    POOLING_TASK_EMBED: _ClassVar[PoolingTask]
    POOLING_TASK_SCORE: _ClassVar[PoolingTask]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class ReasoningStart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASONING_START_BY_MODEL: _ClassVar[ReasoningStart]
    REASONING_START_IN_PROMPT: _ClassVar[ReasoningStart]
    REASONING_START_NONE: _ClassVar[ReasoningStart]
POOLING_TASK_UNSPECIFIED: PoolingTask
POOLING_TASK_EMBED: PoolingTask
POOLING_TASK_SCORE: PoolingTask
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
REASONING_START_BY_MODEL: ReasoningStart
REASONING_START_IN_PROMPT: ReasoningStart
REASONING_START_NONE: ReasoningStart

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "chat", "prompt_token_ids", "pair", "sampling", "stop", "resume_token_ids", "priority", "detokenize", "logprobs", "cache_salt", "deadline_ms", "tenant", "visible_special_tokens", "beam_search", "skip_special_tokens", "truncate_prompt_tokens", "add_special_tokens", "reasoning_budget", "keep_prompt_start", "return_prompt_token_ids", "structured_output", "prompt_logprobs", "prompt_text", "pooling", "prediction")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    KEEP_PROMPT_START_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: str
    chat: ChatInput
    prompt_token_ids: TokenIds
    pair: TextPair
    sampling: SamplingParams
    stop: StopConditions
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    detokenize: bool
    logprobs: int
    cache_salt: str
    deadline_ms: int
    tenant: str
    visible_special_tokens: _containers.RepeatedScalarFieldContainer[str]
    beam_search: BeamSearch
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    add_special_tokens: bool
    reasoning_budget: ReasoningBudget
    keep_prompt_start: bool
    return_prompt_token_ids: bool
    structured_output: StructuredOutput
    prompt_logprobs: int
    prompt_text: bool
    pooling: PoolingParams
    prediction: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., pair: _Optional[_Union[TextPair, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., detokenize: bool = ..., logprobs: _Optional[int] = ..., cache_salt: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., visible_special_tokens: _Optional[_Iterable[str]] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., skip_special_tokens: bool = ..., truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: bool = ..., reasoning_budget: _Optional[_Union[ReasoningBudget, _Mapping]] = ..., keep_prompt_start: bool = ..., return_prompt_token_ids: bool = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., prompt_text: bool = ..., pooling: _Optional[_Union[PoolingParams, _Mapping]] = ..., prediction: _Optional[str] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("task", "dimensions")
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    task: PoolingTask
    dimensions: int
    def __init__(self, task: _Optional[_Union[PoolingTask, str]] = ..., dimensions: _Optional[int] = ...) -> None: ...

class TextPair(_message.Message):
    __slots__ = ("query", "document", "instruction")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    query: str
    document: str
    instruction: str
    def __init__(self, query: _Optional[str] = ..., document: _Optional[str] = ..., instruction: _Optional[str] = ...) -> None: ...

class PoolResponse(_message.Message):
    __slots__ = ("request_id", "values", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    values: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., values: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class ReasoningBudget(_message.Message):
    __slots__ = ("max_tokens", "begin", "end")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    begin: str
    end: str
    def __init__(self, max_tokens: _Optional[int] = ..., begin: _Optional[str] = ..., end: _Optional[str] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "begin_after", "whitespace_pattern", "field_name", "tags", "parts")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    BEGIN_AFTER_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    FIELD_NAME_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choices
    grammar: str
    structural_tag: str
    begin_after: str
    whitespace_pattern: str
    field_name: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.RepeatedCompositeFieldContainer[GrammarPart]
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ..., begin_after: _Optional[str] = ..., whitespace_pattern: _Optional[str] = ..., field_name: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[_Union[GrammarPart, _Mapping]]] = ...) -> None: ...

class GrammarPart(_message.Message):
    __slots__ = ("first_line", "field_name")
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    FIELD_NAME_FIELD_NUMBER: _ClassVar[int]
    first_line: int
    field_name: str
    def __init__(self, first_line: _Optional[int] = ..., field_name: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "num_returned", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_RETURNED_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    num_returned: int
    length_penalty: float
    early_stopping: bool
    def __init__(self, width: _Optional[int] = ..., num_returned: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: bool = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "template_kwargs", "tools", "chat_template", "documents", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    template_kwargs: _struct_pb2.Struct
    tools: str
    chat_template: str
    documents: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: bool = ..., template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., tools: _Optional[str] = ..., chat_template: _Optional[str] = ..., documents: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ..., continue_final_message: bool = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "null_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    NULL_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: str
    tool_call_id: str
    reasoning_content: str
    null_content: bool
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ..., null_content: bool = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., include_stop_str_in_output: bool = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "error", "queue_seconds", "cumulative_logprob", "resumes", "preemptions", "worker_losses", "hypotheses", "pooled")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOSSES_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    error: Error
    queue_seconds: float
    cumulative_logprob: float
    resumes: int
    preemptions: int
    worker_losses: WorkerLosses
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    pooled: bytes
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., queue_seconds: _Optional[float] = ..., cumulative_logprob: _Optional[float] = ..., resumes: _Optional[int] = ..., preemptions: _Optional[int] = ..., worker_losses: _Optional[_Union[WorkerLosses, _Mapping]] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("token_ids", "text", "score", "reason", "stop_token_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    score: float
    reason: FinishReason
    stop_token_id: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., score: _Optional[float] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "field", "retry_after_ms", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    field: str
    retry_after_ms: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "text", "finish", "logprobs", "top_token_ids", "top_logprobs", "token_bytes", "top_token_bytes", "prompt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish: Finish
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    top_token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    prompt: PromptOutput
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., token_bytes: _Optional[_Iterable[bytes]] = ..., top_token_bytes: _Optional[_Iterable[bytes]] = ..., prompt: _Optional[_Union[PromptOutput, _Mapping]] = ...) -> None: ...

class PromptOutput(_message.Message):
    __slots__ = ("stream", "text", "token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs", "distinct_ids", "distinct_sizes", "distinct_bytes")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_IDS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_SIZES_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_BYTES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    text: str
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    distinct_ids: bytes
    distinct_sizes: _containers.RepeatedScalarFieldContainer[int]
    distinct_bytes: bytes
    def __init__(self, stream: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., distinct_ids: _Optional[bytes] = ..., distinct_sizes: _Optional[_Iterable[int]] = ..., distinct_bytes: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens", "return_token_strs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatInput
    add_special_tokens: bool
    return_token_strs: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., add_special_tokens: bool = ..., return_token_strs: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "token_strs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_strs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_strs: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "created", "max_model_len", "vocab_size", "has_chat_template", "tool_parser", "reasoning_parser", "reasoning_starts", "reasoning_end_token_id", "root", "task", "template_inputs")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_STARTS_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_INPUTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    created: int
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    tool_parser: str
    reasoning_parser: str
    reasoning_starts: _containers.RepeatedScalarFieldContainer[ReasoningStart]
    reasoning_end_token_id: int
    root: str
    task: PoolingTask
    template_inputs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., created: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., has_chat_template: bool = ..., tool_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., reasoning_starts: _Optional[_Iterable[_Union[ReasoningStart, str]]] = ..., reasoning_end_token_id: _Optional[int] = ..., root: _Optional[str] = ..., task: _Optional[_Union[PoolingTask, str]] = ..., template_inputs: _Optional[_Iterable[str]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("waiting", "running", "used_blocks", "total_blocks", "ready_workers", "preemptions", "retry_after_seconds")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    used_blocks: int
    total_blocks: int
    ready_workers: int
    preemptions: int
    retry_after_seconds: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., used_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., ready_workers: _Optional[int] = ..., preemptions: _Optional[int] = ..., retry_after_seconds: _Optional[int] = ...) -> None: ...

class MultiplexRequest(_message.Message):
    __slots__ = ("submit", "abort", "reserve", "checksum")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: int
    reserve: bool
    checksum: int
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[int] = ..., reserve: bool = ..., checksum: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("stream", "request", "moved", "worker_losses", "job", "traceparent", "tracestate")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOSSES_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    request: bytes
    moved: bool
    worker_losses: WorkerLosses
    job: int
    traceparent: str
    tracestate: str
    def __init__(self, stream: _Optional[int] = ..., request: _Optional[bytes] = ..., moved: bool = ..., worker_losses: _Optional[_Union[WorkerLosses, _Mapping]] = ..., job: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class WorkerLosses(_message.Message):
    __slots__ = ("workers", "alone")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    workers: int
    alone: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, workers: _Optional[int] = ..., alone: _Optional[_Iterable[float]] = ...) -> None: ...

class MultiplexResponse(_message.Message):
    __slots__ = ("streams", "indices", "token_counts", "text_sizes", "prompt_tokens", "token_ids", "text", "finished", "load", "models", "draining", "instance_id", "reservation_changes", "reserved", "candidate_counts", "candidate_ids", "candidate_logprobs", "candidate_sizes", "candidate_bytes", "prompts", "received", "checksum")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TEXT_SIZES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_CHANGES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_IDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_SIZES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    streams: bytes
    indices: bytes
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    text_sizes: bytes
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    text: bytes
    finished: _containers.RepeatedCompositeFieldContainer[StreamFinish]
    load: Load
    models: ListModelsResponse
    draining: bool
    instance_id: str
    reservation_changes: int
    reserved: bool
    candidate_counts: _containers.RepeatedScalarFieldContainer[int]
    candidate_ids: bytes
    candidate_logprobs: bytes
    candidate_sizes: _containers.RepeatedScalarFieldContainer[int]
    candidate_bytes: bytes
    prompts: _containers.RepeatedCompositeFieldContainer[PromptOutput]
    received: int
    checksum: int
    def __init__(self, streams: _Optional[bytes] = ..., indices: _Optional[bytes] = ..., token_counts: _Optional[_Iterable[int]] = ..., text_sizes: _Optional[bytes] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., text: _Optional[bytes] = ..., finished: _Optional[_Iterable[_Union[StreamFinish, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., models: _Optional[_Union[ListModelsResponse, _Mapping]] = ..., draining: bool = ..., instance_id: _Optional[str] = ..., reservation_changes: _Optional[int] = ..., reserved: bool = ..., candidate_counts: _Optional[_Iterable[int]] = ..., candidate_ids: _Optional[bytes] = ..., candidate_logprobs: _Optional[bytes] = ..., candidate_sizes: _Optional[_Iterable[int]] = ..., candidate_bytes: _Optional[bytes] = ..., prompts: _Optional[_Iterable[_Union[PromptOutput, _Mapping]]] = ..., received: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class StreamFinish(_message.Message):
    __slots__ = ("stream", "finish")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    stream: int
    finish: Finish
    def __init__(self, stream: _Optional[int] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ...) -> None: ...
