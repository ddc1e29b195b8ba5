"""Teacher forcing, for benchmarks of speculation: outputs that are known in advance.

The worker does all of its work, drafts and verification included, and draws a token at each place.
Then it replaces the token by the recorded one. So the acceptance of drafts is that of real text,
for any weights.

Clients cannot use it: no request and no message of the protocol has a field for it. A worker forces
texts only if it was started with `--forced-texts FILE`, which needs `--load-format dummy`: with
random weights it could not serve anyway. It refuses every prompt that is not in the file.

FILE has JSON lines: {"prompt_token_ids": [...], "token_ids": [...]}. `pagewire bench speculative`
writes it.

How a backend forces:

- `Limits.forced` is not None, and `Limits.forced.longest` is the longest output.
- `SlotStarts.forced [starts, longest]` int32 has the output of each sequence that takes a slot, -1
  after its end. It does not depend on the tokens that the sequence has generated already.
- `DeviceSlots.forced_tokens [slots, longest + 1]` int32 keeps it on the device.
- `DeviceSlots.forced(tokens, slots, indices)` returns the tokens that replace the drawn ones. Call
  it where a token is chosen: after `sample`, and before any use of the token, such as last tokens,
  penalties, the comparison with drafts, and log probabilities. `indices` are those of the tokens in
  the outputs, so a backend that keeps positions on the device passes its own. It needs no host and
  may be captured in a graph. `DeviceSlots.sample` calls it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagewire.packing import Int32Array, pack, unpack
from pagewire.worker.errors import SetupError


@dataclass(frozen=True, slots=True)
class ForcedTexts:
    """The output of each prompt of a benchmark."""

    outputs: dict[bytes, Int32Array]  # by the prompt, packed

    @property
    def longest(self) -> int:
        """Tokens of the longest output."""
        return max(map(len, self.outputs.values()))

    def of(self, prompt: Int32Array) -> Int32Array | None:
        """The output of a prompt `[n]`; None if the benchmark does not have it."""
        return self.outputs.get(pack(prompt))


def read_forced_texts(path: Path, vocab_size: int) -> ForcedTexts:
    """The texts of a file; SetupError if it cannot be used."""
    outputs = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SetupError(f"--forced-texts {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            text = json.loads(line)
            tokens = unpack(pack(text["token_ids"]))
            if not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
                raise ValueError(f"the output has no tokens, or some outside the {vocab_size} ids")
            outputs[pack(text["prompt_token_ids"])] = tokens
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise SetupError(
                f"--forced-texts {path}, line {number}: {error!r}; `pagewire bench speculative` "
                "writes such files"
            ) from error
    if not outputs:
        raise SetupError(f"--forced-texts {path}: holds no text")
    return ForcedTexts(outputs)


def forced_rows(outputs: list[Int32Array], longest: int) -> Int32Array:
    """`SlotStarts.forced` of the outputs of some sequences."""
    rows = np.full((len(outputs), longest), -1, np.int32)
    for row, output in zip(rows, outputs, strict=True):
        row[: len(output)] = output
    return rows
