"""A worker with quantized weights generates the tokens of plain torch with dequantized ones."""

from pathlib import Path

import pytest

from support.models.host_graphs import with_host_graphs
from support.models.quantized_models import Format, awq, gptq, save_quantized
from support.models.step_driver import Sequence, StepDriver, local_worker
from support.models.tiny_models import greedy_tokens

COUNT = 32
PROMPTS = [[(7 * i + start) % 199 for i in range(start + 5)] for start in (0, 11, 40)]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "form",
    [awq(32), gptq(4, 32, symmetric=True, order=True)],
    ids=["awq", "gptq"],
)
async def test_greedy_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Format, graphs: bool
) -> None:
    model = save_quantized(tmp_path, "qwen3", form, hidden_size=128, intermediate_size=256)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    adapt = with_host_graphs(monkeypatch) if graphs else lambda loaded: loaded
    async with local_worker(tmp_path, adapt=adapt) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        sequences = [Sequence(prompt, COUNT) for prompt in PROMPTS]
        assert await driver.run(sequences, chunk=9, run_ahead=2) == expected
