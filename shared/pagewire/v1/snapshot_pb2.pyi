from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_PHASE_WAITING: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREFILL: _ClassVar[RequestPhase]
    REQUEST_PHASE_DECODE: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREEMPTED: _ClassVar[RequestPhase]
    REQUEST_PHASE_HELD: _ClassVar[RequestPhase]
REQUEST_PHASE_WAITING: RequestPhase
REQUEST_PHASE_PREFILL: RequestPhase
REQUEST_PHASE_DECODE: RequestPhase
REQUEST_PHASE_PREEMPTED: RequestPhase
REQUEST_PHASE_HELD: RequestPhase

class SnapshotRequest(_message.Message):
    __slots__ = ("steps_after",)
    STEPS_AFTER_FIELD_NUMBER: _ClassVar[int]
    steps_after: int
    def __init__(self, steps_after: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("instance_id", "now", "workers", "num_workers", "steps", "requests", "gateways", "output_tokens", "prompt_tokens", "cached_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    now: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerSnapshot]
    num_workers: int
    steps: StepTable
    requests: RequestTable
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStream]
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, instance_id: _Optional[str] = ..., now: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerSnapshot, _Mapping]]] = ..., num_workers: _Optional[int] = ..., steps: _Optional[_Union[StepTable, _Mapping]] = ..., requests: _Optional[_Union[RequestTable, _Mapping]] = ..., gateways: _Optional[_Iterable[_Union[GatewayStream, _Mapping]]] = ..., output_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class WorkerSnapshot(_message.Message):
    __slots__ = ("address", "device", "dtype", "draining", "num_slots", "num_running", "block_size", "device_blocks", "host_blocks", "tree")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    address: str
    device: str
    dtype: str
    draining: bool
    num_slots: int
    num_running: int
    block_size: int
    device_blocks: BlockMap
    host_blocks: BlockMap
    tree: PrefixOutline
    def __init__(self, address: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., draining: bool = ..., num_slots: _Optional[int] = ..., num_running: _Optional[int] = ..., block_size: _Optional[int] = ..., device_blocks: _Optional[_Union[BlockMap, _Mapping]] = ..., host_blocks: _Optional[_Union[BlockMap, _Mapping]] = ..., tree: _Optional[_Union[PrefixOutline, _Mapping]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("cells", "blocks_per_cell", "counts")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    cells: bytes
    blocks_per_cell: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cells: _Optional[bytes] = ..., blocks_per_cell: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixOutline(_message.Message):
    __slots__ = ("parents", "blocks", "on_device", "hits", "holders", "num_nodes")
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    on_device: _containers.RepeatedScalarFieldContainer[int]
    hits: _containers.RepeatedScalarFieldContainer[int]
    holders: _containers.RepeatedScalarFieldContainer[int]
    num_nodes: int
    def __init__(self, parents: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ..., on_device: _Optional[_Iterable[int]] = ..., hits: _Optional[_Iterable[int]] = ..., holders: _Optional[_Iterable[int]] = ..., num_nodes: _Optional[int] = ...) -> None: ...

class StepTable(_message.Message):
    __slots__ = ("last", "workers", "ended", "durations", "decodes", "prefills", "copies")
    LAST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    last: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    ended: _containers.RepeatedScalarFieldContainer[float]
    durations: _containers.RepeatedScalarFieldContainer[int]
    decodes: _containers.RepeatedScalarFieldContainer[int]
    prefills: _containers.RepeatedScalarFieldContainer[int]
    copies: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, last: _Optional[int] = ..., workers: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[float]] = ..., durations: _Optional[_Iterable[int]] = ..., decodes: _Optional[_Iterable[int]] = ..., prefills: _Optional[_Iterable[int]] = ..., copies: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestTable(_message.Message):
    __slots__ = ("ids", "phases", "workers", "prompt_tokens", "computed_tokens", "output_tokens", "max_tokens", "cached_tokens")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    phases: _containers.RepeatedScalarFieldContainer[RequestPhase]
    workers: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., phases: _Optional[_Iterable[_Union[RequestPhase, str]]] = ..., workers: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., computed_tokens: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class GatewayStream(_message.Message):
    __slots__ = ("peer", "num_open", "asks")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    num_open: int
    asks: bool
    def __init__(self, peer: _Optional[str] = ..., num_open: _Optional[int] = ..., asks: bool = ...) -> None: ...
