"""The time model: fitted to measurements, and refused if they do not determine it."""

import pytest

from pagewire.config import SimulatedWorkerConfig
from pagewire.simulator.profile import load_profile
from pagewire.simulator.step_time import StepTime, Work, fit

PROFILES = ("h200-llama-3.1-8b", "h200-qwen3-0.6b")


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_reproduces_its_measurements(name: str) -> None:
    profile = load_profile(name)
    for measured in profile.measurements:
        predicted = profile.step_time.seconds(measured.work)
        assert predicted == pytest.approx(measured.seconds, rel=0.05), measured.what
        assert measured.source


# 512 requests of 512 tokens in and out, benchmarks/results/serving-h200.json at commit 1dc823e. Not
# used in the fit. 32 steps of 8192 tokens prefill all prompts, then 511 steps decode 512 rows.
@pytest.mark.parametrize(("name", "measured"), [(PROFILES[0], 13501), (PROFILES[1], 36114)])
def test_a_profile_predicts_a_run_that_it_was_not_fitted_to(name: str, measured: float) -> None:
    tokens = 512 * 512
    run = Work(
        steps=32 + 511,
        rows=tokens,
        kv_tokens=tokens * 768,
        prefill_tokens=tokens,
        prefill_pairs=tokens * 256,
    )
    assert tokens / load_profile(name).step_time.seconds(run) == pytest.approx(measured, rel=0.15)


def test_every_profile_can_be_chosen() -> None:
    assert load_profile(SimulatedWorkerConfig().profile).name == PROFILES[0]
    with pytest.raises(ValueError, match="'abacus' does not exist; there are h200-llama"):
        load_profile("abacus")


def test_a_fit_finds_the_costs_behind_exact_measurements() -> None:
    truth = StepTime(4e-3, 1e-5, 3e-8, 2e-5, 1e-9)
    works = [
        Work(1, 1, 400),
        Work(1, 256, 200_000),
        Work(1, 64, 100_000),
        Work(1, 0, 0, 8192, 8192 * 4096),
        Work(1, 0, 0, 512, 512 * 256),
    ]
    fitted = fit((work, truth.seconds(work)) for work in works)
    for work in works:
        assert fitted.seconds(work) == pytest.approx(truth.seconds(work))
    assert fitted.per_kv_token == pytest.approx(truth.per_kv_token)


def test_measurements_that_determine_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match="no measurement has any prefill_tokens, prefill_pairs"):
        fit([(Work(1, 1, 400), 0.004), (Work(1, 2, 400), 0.005), (Work(1, 2, 500), 0.006)])
    same = Work(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="measurements that tell them apart"):
        fit([(same, 0.1)] * 5)
