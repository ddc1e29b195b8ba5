"""EAGLE-3 heads: their drafts, the share of right ones, and refused checkpoints."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagewire.config import WorkerConfig
from pagewire.models import resolve_model
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.eagle.config import parse_eagle_config
from pagewire.worker.protocol.speculation import draft_length
from pagewire.worker.protocol.speculation.sequence_drafts import SequenceDrafts
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.startup.loading import load_worker
from support.drafted_sequences import check_same
from support.eagle_heads import (
    BIGRAM_VOCAB,
    NEVER_DRAFTED,
    ReferenceHead,
    save_bigram_head,
    save_bigrams,
    save_head,
)
from support.models.copied_start import BLOCK_SIZE, run_copied_start
from support.models.step_driver import LocalWorker, Sequence, StepDriver, local_worker
from support.models.tiny_models import VOCAB, save_model

MODEL = pb.DRAFTER_DRAFT_MODEL
GREEDY = pb.SlotSampling(top_p=1)
INPUTS = (0, 1, 2)  # of models of three layers
VARIANTS = ("llama", "granite", "olmo2", "cohere", "gemma2", "mistral-window", "deepseek-v3")


@dataclass
class Drafts:
    """The drafts of a head: slot, position of the token before them, and tokens."""

    made: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def record(self, backend: EagerBackend) -> None:
        """Records all drafts that the backend's head makes from now on."""
        assert backend.draft is not None
        propose = backend.draft.propose

        def recording(plan: DevicePlan, *more: Any) -> DevicePlan:
            proposed = propose(plan, *more)
            if plan.drafts is not None and proposed.drafts is not None:
                before = -1
                for row, (given, token) in enumerate(
                    zip(plan.drafts.tolist(), proposed.drafts.tolist(), strict=True)
                ):
                    if given == NO_DRAFT:
                        before = row
                    elif given != token:
                        if row == before + 1:
                            slot = int(plan.decode_slots[before])
                            self.made.append((slot, int(plan.decode_positions[before]), []))
                        self.made[-1][2].append(token)
            return proposed

        backend.draft.propose = recording  # type: ignore[method-assign]


def backend_of(worker: LocalWorker) -> EagerBackend:
    backend = worker.loaded.backend
    assert isinstance(backend, EagerBackend)
    return backend


def eagle(folder: Path, head: Path, **settings: Any) -> Any:
    return local_worker(folder, speculate="eagle", draft_model=str(head), **settings)


@pytest.mark.parametrize("variant", VARIANTS)
async def test_drafts_are_those_of_the_definition(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all kinds of targets: after prompts in chunks, and after right and wrong drafts."""
    monkeypatch.setattr(draft_length.DraftLength, "next", lambda *_: 4)
    monkeypatch.setattr(SequenceDrafts, "_is_worth_trying", lambda *_: False)  # others draft less
    target = save_model(tmp_path / "model", variant)
    head = save_head(
        tmp_path / "head", tmp_path / "model", 150, eagle_aux_hidden_state_layer_ids=INPUTS
    )
    if variant == "granite":
        tensors = load_file(head / "model.safetensors")
        hidden = target.config.hidden_size
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, hidden)
        save_file(tensors, head / "model.safetensors")
    await check_drafts(tmp_path, ReferenceHead(head, target, INPUTS), VOCAB)


async def test_drafts_behind_right_ones_are_those_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_length.DraftLength, "next", lambda *_: 4)
    monkeypatch.setattr(SequenceDrafts, "_is_worth_trying", lambda *_: False)
    save_bigrams(tmp_path / "model")
    head = save_bigram_head(tmp_path / "head", tmp_path / "model")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    await check_drafts(tmp_path, ReferenceHead(head, target, (2, 3, 3)), BIGRAM_VOCAB, right=10)


async def check_drafts(
    folder: Path, reference: ReferenceHead, vocabulary: int, right: int = 0
) -> None:
    """Runs the model and the head in `folder`; at least `right` drafts must be right."""
    prompts = ([(i * 61 + j * j * 7) % vocabulary for j in range(20 + 9 * i)] for i in range(3))
    ran = [Sequence(prompt, 24) for prompt in prompts]
    async with eagle(folder / "model", folder / "head") as worker:
        drafts = Drafts()
        drafts.record(backend_of(worker))
        driver = StepDriver(worker.stream(), worker.limits)
        await driver.run(ran, chunk=16, run_ahead=3)
    assert driver.accepted[MODEL] >= right
    assert len(drafts.made) >= 15
    assert max(len(made) for _, _, made in drafts.made) == 4
    by_slot = {sequence.slot: sequence.tokens + sequence.output for sequence in ran}
    for slot, position, made in drafts.made:
        assert made == reference.drafts(by_slot[slot][: position + 1], len(made))


@pytest.mark.parametrize(
    "way", [GREEDY, pb.SlotSampling(top_p=1, temperature=1, seed=4)], ids=["greedy", "sampled"]
)
async def test_a_head_that_knows_its_model_is_right(tmp_path: Path, way: pb.SlotSampling) -> None:
    save_bigrams(tmp_path / "model")
    save_bigram_head(tmp_path / "head", tmp_path / "model")

    def prompts() -> list[Sequence]:
        starts = (3, 17, 33)
        return [Sequence([9, at], BIGRAM_VOCAB - 10, sampling=way) for at in starts]

    async with local_worker(tmp_path / "model") as plain:
        want = prompts()
        await StepDriver(plain.stream(), plain.limits).run(want)
    async with eagle(tmp_path / "model", tmp_path / "head") as worker:
        got = prompts()
        driver = StepDriver(worker.stream(), worker.limits)
        await driver.run(got, run_ahead=2)
        counted = worker.engine.metrics.drafts.value("draft_model", "accepted")
        assert counted == driver.accepted[MODEL]
    check_same(got, want)
    assert driver.drafts[MODEL] > 90
    drawn = sum(sequence.output.count(NEVER_DRAFTED) for sequence in got)
    assert drawn >= 2
    if way is GREEDY:
        # The drafts at the token that is in no draft are wrong, and so are those after them.
        lost = driver.drafts[MODEL] - driver.accepted[MODEL]
        assert drawn <= lost <= drawn * worker.limits.max_drafts
        assert all(sequence.output == _successors(sequence) for sequence in got)
    else:
        assert driver.accepted[MODEL] > 0.7 * driver.drafts[MODEL]
    assert driver.number < 40


def _successors(sequence: Sequence) -> list[int]:
    first = sequence.tokens[-1]
    return [(first + 1 + i) % BIGRAM_VOCAB for i in range(len(sequence.output))]


async def test_a_sequence_behind_a_cached_prefix_drafts_with_its_kv(tmp_path: Path) -> None:
    """It shares a block of another sequence, and starts with a copy of its next one."""
    save_model(tmp_path / "model", "llama")
    head = save_head(
        tmp_path / "head", tmp_path / "model", 150, eagle_aux_hidden_state_layer_ids=INPUTS
    )
    ours = [i * i % VOCAB for i in range(40)]
    theirs = [*ours[:-1], 45]
    async with eagle(tmp_path / "model", head, block_size=BLOCK_SIZE) as worker:
        object.__setattr__(worker.loaded.limits, "max_drafts", 0)
        await run_copied_start(worker, ours, theirs)
        draft = backend_of(worker).draft
        assert draft is not None
        shared = draft.cache.storage[:, [3, 7]].transpose(1, 2).flatten(2, 3)[:, :, :39].clone()
        again = Sequence(theirs, 1)
        await StepDriver(worker.stream(), worker.limits).run([again])
        own = draft.cache.storage[:, again.blocks].transpose(1, 2).flatten(2, 3)[:, :, :39]
        # The last position of the prefix has the token that followed in the other sequence.
        torch.testing.assert_close(shared[:, :, :38], own[:, :, :38], atol=1e-4, rtol=1e-4)
        assert (shared[:, :, 38] - own[:, :, 38]).abs().max() > 0.1


async def test_a_nan_in_a_heads_kv_costs_drafts_and_no_tokens(tmp_path: Path) -> None:
    save_bigrams(tmp_path / "model")
    save_bigram_head(tmp_path / "head", tmp_path / "model")
    async with eagle(tmp_path / "model", tmp_path / "head", num_blocks=9) as worker:
        draft = backend_of(worker).draft
        assert draft is not None
        with torch.inference_mode():
            draft.cache.storage[:, 1:] = torch.nan
        driver = StepDriver(worker.stream(), worker.limits)
        for number in range(6):  # these get all blocks
            before = driver.accepted[MODEL]
            ran = Sequence([9, 45], 40, sampling=GREEDY, salt=str(number))
            await driver.run([ran])
            assert ran.output == _successors(ran)
        assert driver.accepted[MODEL] - before > 20
        assert draft.cache.storage.isfinite().all()


def test_a_block_counts_the_bytes_of_the_heads_kv(tmp_path: Path) -> None:
    folder = resolve_model("embedded")
    # Half a layer of 256 values of keys and values beside eight.
    head = save_head(
        tmp_path, folder, 500, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    given = {"model": str(folder), "device": "cpu", "torch_threads": 1, "cpu_kv_bytes": 1 << 24}
    plain = load_worker(WorkerConfig(**given))
    both = load_worker(WorkerConfig(**given, speculate="eagle", draft_model=str(head)))
    assert both.limits.num_blocks == pytest.approx(plain.limits.num_blocks * 8 / 9, abs=1)
    size = sum(each.nbytes for each in load_file(head / "model.safetensors").values())
    added = both.backend.weight_bytes - plain.backend.weight_bytes
    # Norms are folded, draft tokens are not weights, and embeddings are the model's.
    assert 0 < size - added < 3 * 4 * 256 + 500 * 8 + 4096 + 1


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}],
    ids=str,
)
async def test_other_types_of_the_model(tmp_path: Path, settings: dict[str, str]) -> None:
    """The head is in the model's type and never quantized, nor is its KV."""
    save_bigrams(tmp_path / "model")
    save_bigram_head(tmp_path / "head", tmp_path / "model")
    async with eagle(tmp_path / "model", tmp_path / "head", **settings) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        ran = Sequence([9, 45], 40, sampling=GREEDY)
        await driver.run([ran])
    assert ran.output == _successors(ran)
    assert driver.accepted[MODEL] > 25


def test_random_weights_need_a_config_only(tmp_path: Path) -> None:
    folder = resolve_model("embedded")
    save_head(tmp_path, folder, 500)
    (tmp_path / "model.safetensors").unlink()
    settings = {"speculate": "eagle", "draft_model": str(tmp_path), "load_format": "dummy"}
    worker = load_worker(WorkerConfig(model=str(folder), device="cpu", **settings))
    worker.backend.warm_up()


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, (2, 3, 7)),
        # Some checkpoints number layers by their outputs.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, (2, 4, 5)),
        ({"norm_before_residual": False, "fc_bias": None, "eagle_config": None}, (2, 4, 5)),
        ({"eagle_config": {"next_layer_regular": True, "use_mtp_layernorm": False}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": []}, (2, 4, 5)),
    ],
)
def test_what_a_head_reads(tmp_path: Path, fields: dict[str, Any], inputs: tuple[int, ...]) -> None:
    folder = resolve_model("embedded")
    raw = json.loads((save_head(tmp_path, folder, 500) / "config.json").read_text()) | fields
    config = parse_eagle_config(raw, read_model_config(folder))
    assert config.inputs == inputs
    assert config.model.vocab_size == (fields.get("draft_vocab_size", 500) or 4096)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {"architectures": ["Eagle3Speculator"]},
            "Eagle3Speculator.* is not a supported EAGLE-3 head",
        ),
        (
            {"architectures": ["MistralForCausalLM"]},
            "MistralForCausalLM.* is not a supported EAGLE-3 head",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; an EAGLE-3 head must have 1"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'; .* must have 'llama'"),
        ({"hidden_size": 128}, "hidden_size is 128, and the model's is 256"),
        ({"target_hidden_size": 512}, "target_hidden_size is 512, and the model's is 256"),
        ({"vocab_size": 4095}, "vocab_size is 4095, and the model's is 4096"),
        ({"draft_vocab_size": 5000}, "draft_vocab_size 5000 is more than vocab_size 4096"),
        ({"norm_before_residual": True}, "norm_before_residual is True; this field"),
        ({"norm_before_fc": True}, "norm_before_fc is True; this field"),
        ({"attention_bias": True}, "attention_bias is True; this field"),
        ({"something_new": 3}, "something_new is 3; this field of an EAGLE-3 head is not supp"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .* None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"is_causal": False}, "is_causal is False; an EAGLE-3 head must have True"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "eagle_config.use_aux_hidden_state is False; an EAGLE-3 head must have True",
        ),
        ({"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step is 2; .* have 1"),
        ({"eagle_config": {"another": 2}}, "eagle_config.another is 2; this field"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}, "layers \\[2, 5, 8\\].* has 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5]}, "a head reads 3 of them"),
    ],
)
def test_configurations_that_are_not_supported_are_refused(
    tmp_path: Path, fields: dict[str, Any], part: str
) -> None:
    folder = resolve_model("embedded")
    path = save_head(tmp_path, folder, 500) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    check_refused(tmp_path, f"--draft-model {tmp_path}: {path}: .*{part}")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"fc.weight": None}, "tensor fc.weight \\[256, 768\\] is missing"),
        ({"lm_head.weight": None}, "tensor lm_head.weight \\[500, 256\\] is missing"),
        ({"d2t": None}, "tensor d2t \\[500\\] is missing"),
        ({"d2t": torch.zeros(499, dtype=torch.int64)}, "tensor d2t has shape \\[499\\]"),
        ({"d2t": torch.full((500,), 4000)}, "d2t names tokens outside of 0 to 4095"),
        ({"d2t": -torch.arange(500)}, "d2t has two drafts for one token"),
        ({"lm_head.weight": torch.zeros(400, 256)}, "lm_head.weight has shape \\[400, 256\\]"),
        ({"midlayer.self_attn.q_proj.bias": torch.ones(96)}, "q_proj.bias has no place"),
        ({"fc_norm.weight": torch.ones(768)}, "fc_norm.weight has no place"),
        ({"norm.weight": torch.zeros(256, dtype=torch.int8)}, "norm.weight is of type I8"),
        ({"embed_tokens.weight": torch.zeros(10, 256)}, "embed_tokens.weight has shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], part: str
) -> None:
    save_head(tmp_path, resolve_model("embedded"), 500)
    tensors = load_file(tmp_path / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    check_refused(tmp_path, part)


def check_refused(head: Path, part: str) -> None:
    settings = {"speculate": "eagle", "draft_model": str(head), "device": "cpu"}
    with pytest.raises(SetupError, match=part):
        load_worker(WorkerConfig(model=str(resolve_model("embedded")), **settings))


def test_the_reference_reads_the_inputs_of_layers(tmp_path: Path) -> None:
    """Hidden state i in transformers is the input of layer i."""
    target = save_model(tmp_path, "llama")
    found = AutoModelForCausalLM.from_pretrained(tmp_path)(
        torch.tensor([[3, 4]]), output_hidden_states=True
    )
    embedded = target.get_input_embeddings()(torch.tensor([[3, 4]]))
    assert torch.equal(found.hidden_states[0], embedded)
