"""A draft model or an EAGLE head changes only the number of steps of an answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from pagewire.config import WorkerConfig
from pagewire.models import resolve_model
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.errors import SetupError
from pagewire.worker.model.config import read_model_config
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.protocol.steps.device_plan import BlockCopies, DevicePlan
from pagewire.worker.protocol.steps.step import StepHostCopies
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.startup.loading import check_speculation, load_worker, served_by_kernels
from support.drafted_sequences import check_resumption, check_same, repetitive, sampling, sequences
from support.eagle_heads import save_head
from support.models.constrained_sequences import constrained
from support.models.copied_start import BLOCK_SIZE, run_copied_start
from support.models.step_driver import LocalWorker, Sequence, StepDriver, local_worker
from support.models.tiny_models import VARIANTS, VOCAB, save_model
from support.shortened_model import save_shortened

FOLDER = resolve_model("embedded")
ITSELF = ("draft", FOLDER)
LENGTH = 80
CUTS = {"whole prompts": {}, "chunks": {"run_ahead": 3, "chunk": 16}}
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
GREEDY = pb.SlotSampling(top_p=1)
SAMPLED = pb.SlotSampling(top_p=1, temperature=1, seed=5)
MODEL = pb.DRAFTER_DRAFT_MODEL
Draft = tuple[str, Path]  # values of --speculate and --draft-model


@pytest.fixture(scope="module", params=["itself", "first layers", "another", "head"])
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    """Draft models of the embedded model: right always, often and almost never; a random head."""
    folder = tmp_path_factory.mktemp("draft")
    if request.param == "head":
        # As random models do, it drafts tokens that a bias makes likely, which it has here.
        return "eagle", save_head(folder, FOLDER, drafts=3000, tokens=range(3000))
    if request.param == "itself":
        return "draft", FOLDER
    if request.param == "first layers":
        return "draft", save_shortened(FOLDER, folder, layers=3)
    save_model(folder, "qwen3", vocab_size=4096, max_position_embeddings=4096)
    return "draft", folder


def drafting(draft: Draft, **settings: Any) -> Any:
    return local_worker(FOLDER, speculate=draft[0], draft_model=str(draft[1]), **settings)


def story(way: pb.SlotSampling, **more: Any) -> Sequence:
    chat = "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n"
    return Sequence(TOKENIZER.encode(chat).ids, LENGTH, sampling=way, **more)


def backend_of(worker: LocalWorker) -> EagerBackend:
    backend = worker.loaded.backend
    assert isinstance(backend, EagerBackend)
    return backend


def draft_cache(worker: LocalWorker) -> KVCache:
    model = backend_of(worker).draft
    assert model is not None
    return model.cache


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted() -> dict[str, list[Sequence]]:
    """The sequences without drafts, by the way of cutting them, for all draft models."""
    found = {}
    async with local_worker(FOLDER, num_blocks=512) as plain:
        for name, cut in CUTS.items():
            found[name] = sequences(LENGTH)
            await StepDriver(plain.stream(), plain.limits).run(found[name], **cut)
    return found


@pytest.mark.parametrize("cut", CUTS)
async def test_tokens_are_those_of_steps_without_drafts(
    draft: Draft, wanted: dict[str, list[Sequence]], cut: str
) -> None:
    want = wanted[cut]
    async with drafting(draft, num_blocks=512) as worker:
        got = sequences(LENGTH)
        driver = StepDriver(worker.stream(), worker.limits)
        await driver.run(got, **CUTS[cut])
        assert worker.fatal == []
    assert driver.drafts[MODEL] > 50
    check_same(got, want)


@pytest.mark.parametrize("way", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_the_model_itself_is_right_nearly_always(way: pb.SlotSampling) -> None:
    """Also with a temperature, because drafts are drawn with the noise of their tokens."""
    async with local_worker(FOLDER) as plain:
        (want,) = await StepDriver(plain.stream(), plain.limits).run([story(way)])
    async with drafting(ITSELF) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        assert await driver.run([story(way)]) == [want]
        assert driver.drafts[MODEL] > LENGTH / 2
        assert driver.accepted[MODEL] >= 0.95 * driver.drafts[MODEL]
        assert driver.number < LENGTH / 4
        # The worker counts them, too.
        counted = worker.engine.metrics.drafts.value("draft_model", "accepted")
        assert counted == driver.accepted[MODEL]


async def test_after_each_step_the_draft_model_has_the_kv_of_all_tokens(
    draft: Draft,
) -> None:
    """Also for tokens of another drafter, and for the last token after right drafts."""
    ways = [GREEDY, sampling(temperature=0.7, seed=1), sampling()]
    ran = [Sequence(repetitive(i, 5 + i), 60, sampling=way) for i, way in enumerate(ways)]
    async with drafting(draft) as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        (told,) = await driver.run([story(SAMPLED)])
        ran += [story(GREEDY), story(SAMPLED, prediction=told), constrained(1)]
        await driver.run(ran, run_ahead=3, chunk=16)
        assert driver.drafts[MODEL] > 0
        assert driver.accepted[pb.DRAFTER_PREDICTION] > 0
        # A head has that of the last token here, with the token drawn after it.
        behind = 1 if draft[0] == "eagle" else 0
        written = [_kv(worker, sequence, behind) for sequence in ran]
        # The same tokens as prompts.
        again = [Sequence(s.tokens + s.output[:-1], 1) for s in ran]
        await driver.run(again)
        for kv, sequence in zip(written, again, strict=True):
            torch.testing.assert_close(kv, _kv(worker, sequence, behind), atol=1e-3, rtol=1e-3)
            assert kv.abs().amax((0, 2, 3)).min() > 0  # [parts, tokens, heads, head_dim] by token


def _kv(worker: LocalWorker, sequence: Sequence, behind: int = 0) -> torch.Tensor:
    """The draft model's KV `[2 * layers, heads, tokens, head_dim]` of all tokens except the last
    and `behind` others."""
    count = len(sequence.tokens) + len(sequence.output) - 1 - behind
    kv = draft_cache(worker).storage[:, sequence.blocks]  # [parts, blocks, heads, block, dim]
    return kv.transpose(1, 2).flatten(2, 3)[:, :, :count].clone()


async def test_a_resumed_sequence_goes_on_as_it_would_have(draft: Draft) -> None:
    async with drafting(draft, num_blocks=256) as worker:
        await check_resumption(worker, LENGTH, (1, 50), run_ahead=2)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "window" in v or "gemma" in v][:4])
async def test_other_kinds_of_attention(tmp_path: Path, variant: str) -> None:
    """Of the model or of the draft model, with windows of 24 tokens."""
    save_model(tmp_path / "one", variant)
    save_model(tmp_path / "other", "llama")
    for model, other in (("one", "other"), ("other", "one"), ("one", "one")):
        outputs = []
        drafts = {"speculate": "draft", "draft_model": str(tmp_path / other)}
        for settings in ({}, drafts):
            async with local_worker(tmp_path / model, **settings) as worker:
                ran = [Sequence([(i * 7 + j % 5) % VOCAB for j in range(40)], 60) for i in range(4)]
                driver = StepDriver(worker.stream(), worker.limits)
                outputs.append(await driver.run(ran, run_ahead=2))
        assert outputs[0] == outputs[1]
        assert driver.drafts[MODEL] > 0
        if model == other:
            assert driver.accepted[MODEL] > 0.9 * driver.drafts[MODEL]


async def test_copies_of_blocks_have_the_kv_of_both_models() -> None:
    async with drafting(ITSELF, host_memory_gb=0.01) as worker:
        backend = backend_of(worker)
        assert backend.draft is not None
        storages = [backend._cache.storage, backend.draft.cache.storage]
        for storage in storages:
            _write(storage, 3, 0.5)
        wanted = [storage[:, 3].clone() for storage in storages]
        one = np.array([3], np.int32)
        host, none = np.array([1], np.int32), np.empty(0, np.int32)
        backend.copy(StepHostCopies(one, host, none, none))
        backend.copy(StepHostCopies(none, none, host, one + 4))
        backend.submit(_copying(BlockCopies(one, one + 5)))
        for storage, kv in zip(storages, wanted, strict=True):
            assert torch.equal(storage[:, 7], kv)
            assert torch.equal(storage[:, 8], kv)
            _write(storage, 3, torch.nan)
        backend.scrub(one)
        for storage in storages:
            assert storage[:, 3].isfinite().all()


def _write(storage: torch.Tensor, blocks: int | slice, value: float) -> None:
    with torch.inference_mode():
        storage[:, blocks] = value


def _copying(copies: BlockCopies) -> DevicePlan:
    none = np.empty(0, np.int32)
    return DevicePlan(None, None, none, none, None, none, none, False, copies=copies)


async def test_a_cached_prefix_has_the_kv_of_both_models() -> None:
    """The second sequence shares a block of the first, and starts with a copy of another."""
    ours = [40 + i % 90 for i in range(40)]
    theirs = [*ours[:-1], 45]
    async with drafting(ITSELF, block_size=BLOCK_SIZE) as worker:
        await run_copied_start_greedily(worker, ours, theirs)
        cache = draft_cache(worker).storage
        shared = cache[:, [3, 7]].transpose(1, 2).flatten(2, 3)[:, :, : len(theirs)].clone()
        (again,) = [Sequence(theirs, 1)]
        await StepDriver(worker.stream(), worker.limits).run([again])
        torch.testing.assert_close(shared, _kv(worker, again), atol=1e-3, rtol=1e-3)


async def run_copied_start_greedily(
    worker: LocalWorker, ours: list[int], theirs: list[int]
) -> None:
    """Without drafts, so that each row of a step has one token."""
    object.__setattr__(worker.loaded.limits, "max_drafts", 0)
    await run_copied_start(worker, ours, theirs)


async def test_a_nan_in_the_draft_models_kv_costs_drafts_and_no_tokens() -> None:
    async with local_worker(FOLDER) as plain:
        (want,) = await StepDriver(plain.stream(), plain.limits).run([story(GREEDY)])
    async with drafting(ITSELF, num_blocks=29) as worker:
        _write(draft_cache(worker).storage, slice(1, None), torch.nan)
        driver = StepDriver(worker.stream(), worker.limits)
        for number in range(6):  # these get all blocks; none drafts from the output of another
            before = driver.accepted[MODEL]
            assert await driver.run([story(GREEDY, salt=str(number))]) == [want]
        assert driver.accepted[MODEL] - before > LENGTH / 2
        assert draft_cache(worker).storage.isfinite().all()


async def test_a_failed_step_with_drafts_fails_its_sequences_alone() -> None:
    async with drafting(ITSELF, num_blocks=256) as worker:
        model = backend_of(worker).draft
        assert model is not None
        propose, calls = model.propose, 0

        def failing(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 6:
                raise RuntimeError("this step fails")
            return propose(*given)

        model.propose = failing  # type: ignore[method-assign]
        driver = StepDriver(worker.stream(), worker.limits)
        failed = [story(GREEDY), story(SAMPLED)]
        await driver.run(failed, run_ahead=2)
        assert all("this step fails" in sequence.failure for sequence in failed)
        outputs = await driver.run([story(GREEDY), story(SAMPLED)], run_ahead=2)
        for sequence, output in zip(failed, outputs, strict=True):
            drawn = [token for token in sequence.output if token >= 0]
            assert output[: len(drawn)] == drawn
            assert min(output) >= 0
        assert worker.fatal == []


def test_a_block_counts_the_bytes_of_both_models(tmp_path: Path) -> None:
    save_shortened(FOLDER, tmp_path, layers=4)
    given = {"model": str(FOLDER), "device": "cpu", "torch_threads": 1, "cpu_kv_bytes": 1 << 24}
    plain = load_worker(WorkerConfig(**given, host_memory_gb=0.01))
    both = load_worker(
        WorkerConfig(**given, host_memory_gb=0.01, speculate="draft", draft_model=str(tmp_path))
    )
    # Four layers beside eight.
    assert both.limits.num_blocks == pytest.approx(plain.limits.num_blocks / 1.5, abs=1)
    assert both.limits.host_blocks == pytest.approx(plain.limits.host_blocks / 1.5, abs=1)
    assert both.backend.kv_cache_bytes <= 1 << 24
    assert both.backend.weight_bytes > plain.backend.weight_bytes
    both.backend.warm_up()
    assert both.backend.host_costs is not None


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"speculate": "draft"}, "--speculate draft needs .* add --draft-model"),
        ({"speculate": "eagle"}, "--speculate eagle needs .* add --draft-model"),
        ({"draft_model": "x"}, "--draft-model x needs --speculate draft or eagle"),
        (
            {"speculate": "suffix", "draft_model": "x"},
            "--draft-model x needs --speculate draft or eagle; add it or leave --draft-model out",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(SetupError, match=part):
        load_worker(WorkerConfig(model=str(FOLDER), device="cpu", **settings))


@pytest.mark.parametrize(
    ("variant", "sizes", "part"),
    [
        ("llama", {}, f"has {VOCAB} token ids and the model 4096; .* --speculate suffix"),
        ("llama", {"vocab_size": 4096}, "reads 512 tokens.*2048; set --max-model-len 512 or less"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    tmp_path: Path, variant: str, sizes: dict[str, int], part: str
) -> None:
    save_model(tmp_path, variant, **sizes)
    settings = {"speculate": "draft", "draft_model": str(tmp_path), "device": "cpu"}
    with pytest.raises(SetupError, match=part):
        load_worker(WorkerConfig(model=str(FOLDER), **settings))


def test_a_family_that_is_not_served_is_refused_with_the_settings_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "architectures": ["Mamba"]}')
    settings = {"speculate": "draft", "draft_model": str(tmp_path), "device": "cpu"}
    with pytest.raises(SetupError, match=f"--draft-model {tmp_path}: .*Mamba is not a supp"):
        load_worker(WorkerConfig(model=str(FOLDER), **settings))
    settings["draft_model"] = "no/such-model"
    with pytest.raises(FileNotFoundError, match="--draft-model no/such-model: "):
        load_worker(WorkerConfig(model=str(FOLDER), **settings))


@pytest.mark.parametrize("speculate", ["draft", "eagle"])
def test_a_gpu_needs_kernels_that_make_drafts(speculate: str) -> None:
    config = WorkerConfig(model=str(FOLDER), speculate=speculate, draft_model="x")
    gpu = torch.device("cuda", 0)
    check_speculation(config, gpu, "triton", pools=False)
    with pytest.raises(SetupError, match=f"--speculate {speculate} on cuda:0 .* leave --ops torch"):
        check_speculation(config, gpu, "torch", pools=False)


def test_a_draft_model_that_the_kernels_do_not_serve_is_refused_by_name(tmp_path: Path) -> None:
    gpu = torch.device("meta")
    save_model(tmp_path, "mistral-window")
    model = read_model_config(tmp_path)
    config = WorkerConfig(model=str(FOLDER), speculate="draft", draft_model="x")
    assert served_by_kernels(config, model, gpu, longest=512).served_head_dim == 32
    with pytest.raises(SetupError, match=r"--draft-model x: --batch-invariant .* a sliding window"):
        served_by_kernels(replace(config, batch_invariant=True), model, gpu, longest=512)
    with pytest.raises(SetupError, match=r"--draft-model x: config\.json: head_dim is 512"):
        served_by_kernels(config, replace(model, head_dim=512), gpu, longest=512)
