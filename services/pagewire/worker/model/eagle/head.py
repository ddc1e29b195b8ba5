"""An EAGLE-3 head, of Li et al., 2025, "EAGLE-3: Scaling up Inference Acceleration of LLMs"."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.worker.model.config import ModelConfig
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.fused_layer import FusedLayer
from pagewire.worker.model.weights import LayerWeights
from pagewire.worker.ops.contract.blocks import KVScales


class PairLayer(FusedLayer):
    """The layer of a head: attention reads two vectors of a token, each with a norm of its own.

    The weights of both norms are folded into the projection of queries, keys and values. Its input
    is the embedded token, then the state.
    """

    def queries(
        self,
        weights: LayerWeights,
        residual: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        keys: Tensor,
        values: Tensor,
        scales: KVScales | None,
        out: Tensor | None,
    ) -> Tensor:
        """As `FusedLayer.queries`, with `residual [tokens, 2 * hidden]`."""
        assert isinstance(weights.qkv, Tensor)
        both = residual.unflatten(1, (2, -1)).flatten(0, 1)  # [2 * tokens, hidden]
        normed = self._ops.rms_norm(both, None, self._eps).view_as(residual)
        return self._ops.qk_norm_rope_kv_write(
            self._ops.linear(normed, weights.qkv),
            None,
            None,
            self._eps,
            cos_sin,
            positions,
            slots,
            block_tables,
            keys,
            values,
            scales=scales,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head: a decoder of one `PairLayer`, and its connection to the target.

    At position i it reads token i + 1 and the state of position i. The state is the fused state of
    the target's layers. After the last token with states of the target, the state is the head's own
    output of position i. The output of position i determines the logits of token i + 2.
    """

    decoder: Decoder  # its head has the vocabulary of drafts
    fusion: Tensor  # [hidden, 3 * hidden]
    token_ids: Tensor | None  # [drafts] int64, the token of each draft; None: they are the same
    vocab_size: int
    inputs: tuple[int, ...]  # see `EagleConfig`
    weight_bytes: int  # without the target's weights

    @property
    def config(self) -> ModelConfig:
        """The configuration of the layer."""
        return self.decoder.config

    def fused(self, states: Tensor) -> Tensor:
        """The fused states `[tokens, hidden]` of the layers' inputs `[tokens, 3, hidden]`."""
        return self.decoder.ops.linear(states.flatten(1), self.fusion)

    def pairs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """The input of the layer, `[tokens, 2 * hidden]`."""
        return torch.cat((self.decoder.weights.embedding[token_ids], states), -1)

    def with_inputs(self, layer: int) -> "EagleHead":
        """The same head for a target with fewer layers; it reads the input of `layer` only."""
        return replace(self, inputs=(layer,) * len(self.inputs))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits `[rows, vocab]` of `hidden [rows, hidden]`; -inf for tokens without drafts.

        The result is written to `out`, if given; `out` has the -inf already.
        """
        if self.token_ids is None:
            return self.decoder.logits(hidden, out)
        logits = self.decoder.logits(hidden)
        if out is None:
            out = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return out.index_copy_(1, self.token_ids, logits)
