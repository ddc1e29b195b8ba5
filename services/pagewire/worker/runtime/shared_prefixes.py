"""The shared prefixes of captured decode steps, on the device."""

import torch

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import StepPrefixGroup
from pagewire.worker.runtime.prefix_groups import Sharing, buffer_length, pack_ranges, shared_ranges
from pagewire.worker.runtime.staging import Staging


class SharedPrefixes:
    """Memory that captured steps read their shared ranges from; written when these change."""

    def __init__(self, decoder: Decoder, limits: Limits, dtype: torch.dtype, rows: int) -> None:
        from pagewire.worker.ops.device import multiprocessors
        from pagewire.worker.ops.triton.attention.shared_prefix import max_rows_per_item

        model, device = decoder.config, decoder.weights.embedding.device
        self._sharing = Sharing(
            members=max_rows_per_item(dtype, model.head_dim, model.num_heads // model.num_kv_heads),
            kv_heads=model.num_kv_heads,
            processors=multiprocessors(device),
            block_size=limits.block_size,
        )
        self._buffer = torch.zeros(buffer_length(rows), dtype=torch.int32, device=device)
        self._staging = Staging(buffer_length(rows))
        self._held: tuple[tuple[StepPrefixGroup, ...], int] = ((), 0)

    def ranges(self, rows: int) -> SharedPrefixItems:
        """What a step of `rows` rows reads."""
        return shared_ranges(self._buffer[: buffer_length(rows)], rows)

    def copy(self, groups: tuple[StepPrefixGroup, ...], slots: Int32Array, rows: int) -> None:
        """Queues the ranges of a step that decodes `slots` as `rows` rows, if they are new.

        `groups` is another object whenever the groups or the slots that decode have changed.
        """
        if self._held[0] is groups and self._held[1] == rows:
            return
        packed = pack_ranges(groups, slots, rows, self._sharing)
        self._staging.copy_to(self._buffer[: len(packed)], packed)
        self._held = groups, rows
