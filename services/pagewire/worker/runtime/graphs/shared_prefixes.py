"""The items of shared-prefix attention on the device, as captured decode steps read them."""

import numpy as np
import torch

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import StepPrefixGroup
from pagewire.worker.runtime.graphs.staging import Staging
from pagewire.worker.runtime.prefix_groups import ItemSizes, buffer_length, item_views, pack_items


class SharedPrefixes:
    """The buffer that captured steps read. It is written only when the groups change."""

    def __init__(self, decoder: Decoder, limits: Limits, dtype: torch.dtype, rows: int) -> None:
        from pagewire.worker.ops.device import multiprocessors

        model, device = decoder.config, decoder.weights.embedding.device
        group = model.num_heads // model.num_kv_heads
        self._sizes = ItemSizes(
            limits=decoder.ops.shared_prefix_limits(dtype, model.served_head_dim, group),
            kv_heads=model.num_kv_heads,
            processors=multiprocessors(device),
            block_size=limits.block_size,
        )
        length = self._length(rows)
        self._buffer = torch.zeros(length, dtype=torch.int32, device=device)
        self._staging = Staging(length)
        self._copied: tuple[tuple[StepPrefixGroup, ...], int] = ((), 0)
        # The slots of the copied rows. Compared only if a slot may have several rows.
        self._slots: Int32Array | None = None
        self._drafts = limits.drafts_on_device

    def items(self, rows: int) -> SharedPrefixItems:
        """The views of the buffer for a step of `rows` rows."""
        return item_views(self._buffer[: self._length(rows)], rows, self._sizes.limits.max_ranges)

    def copy(self, groups: tuple[StepPrefixGroup, ...], slots: Int32Array, rows: int) -> None:
        """Queues the copy of the items of a step that decodes `slots` in `rows` rows, if new.

        `groups` must be another object whenever the groups or the decoding sequences have changed.
        """
        same_rows = not self._drafts or (
            self._slots is not None and np.array_equal(slots, self._slots)
        )
        if self._copied[0] is groups and self._copied[1] == rows and same_rows:
            return
        packed = pack_items(groups, slots, rows, self._sizes)
        self._staging.copy_to(self._buffer[: len(packed)], packed)
        self._copied, self._slots = (groups, rows), slots

    def _length(self, rows: int) -> int:
        """Number of int32 values of the items of a step of `rows` rows."""
        return buffer_length(rows, self._sizes.limits.max_ranges)
