"""Starts the program of a command worker and reads the settings of its model."""

import json
import shlex
from pathlib import Path
from typing import Any

from pagewire.config import WorkerConfig
from pagewire.models import resolve_model, resolve_tokenizer
from pagewire.sampling import NUMBERS
from pagewire.worker.command.backend import CommandBackend
from pagewire.worker.command.text import ProgramText
from pagewire.worker.errors import SetupError
from pagewire.worker.protocol.backend import LoadedWorker
from pagewire.worker.protocol.steps.limits import Limits

_BATCHED_TOKENS = 8192
# The longest step, as a part of `step_timeout`.
_STEP_SHARE = 0.9
# Settings of a model that this process computes itself.
_WITHOUT_USE = (
    "batch_invariant",
    "device",
    "draft_model",
    "dtype",
    "forced_texts",
    "host_memory_gb",
    "kv_cache_dtype",
    "load_format",
    "ops",
    "quantization",
    "speculate",
    "tune_experts",
)


def load_command(config: WorkerConfig) -> LoadedWorker:
    """Starts the program and waits for its first line.

    Raises:
        SetupError, FileNotFoundError: the program or the settings cannot be used.
    """
    try:
        command = shlex.split(config.command or "")
    except ValueError as error:
        raise SetupError(f"--command {config.command!r}: {error}") from error
    if not command:
        raise SetupError("--backend command needs a program; give it with --command")
    longest = _STEP_SHARE * config.step_timeout
    if config.command_timeout > longest:
        raise SetupError(
            f"--command-timeout is {config.command_timeout:g}; it must be at most {longest:g}, as "
            f"--step-timeout is {config.step_timeout:g}: a longer step ends the worker's stream"
        )
    _check_unused(config)
    folder = resolve_model(config.model)
    raw = _read(folder / "config.json")
    max_model_len = config.max_model_len or raw.get("max_position_embeddings")
    vocab_size = raw.get("vocab_size")
    if not isinstance(max_model_len, int) or not isinstance(vocab_size, int):
        raise SetupError(
            f"{folder / 'config.json'} must have vocab_size, and max_position_embeddings unless "
            "--max-model-len is given"
        )
    backend = CommandBackend(command, config.command_start_timeout, config.command_timeout, longest)
    try:
        ready = backend.start()
    except RuntimeError as error:
        raise SetupError(str(error)) from error
    try:
        text = None
        if ready.reads_text or ready.writes_text:
            text = ProgramText(resolve_tokenizer(config.model, config.tokenizer))
        if ready.writes_text and text is not None:
            text.check_pieces()
    except SetupError:
        backend.close()
        raise
    num_slots = min(config.num_slots, ready.max_sequences or config.num_slots)
    limits = Limits(
        vocab_size=vocab_size,
        num_slots=num_slots,
        block_size=config.block_size,
        num_blocks=config.num_blocks or num_slots * -(-max_model_len // config.block_size) + 1,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.worker_max_num_batched_tokens or _BATCHED_TOKENS,
    )
    generation = _read_if_there(folder / "generation_config.json")
    backend.configure(limits, _end_token(generation, raw), _defaults(generation), text)
    return LoadedWorker(backend, limits, "float32", f"command {command[0]}", uses_triton=False)


def _check_unused(config: WorkerConfig) -> None:
    """Raises SetupError for a setting that would change nothing."""
    if config.task not in ("auto", "generate"):
        raise SetupError(
            f"--task {config.task} has no use with --backend command: an external program "
            "generates text; leave it out"
        )
    for name in _WITHOUT_USE:
        value = getattr(config, name)
        if value != getattr(WorkerConfig, name):
            given = "" if value is True else f" {value}"
            raise SetupError(
                f"--{name.replace('_', '-')}{given} has no use with --backend command; leave it out"
            )


def _end_token(generation: dict[str, Any], raw: dict[str, Any]) -> int | None:
    """The end-of-sequence token that the scheduler uses too."""
    given = generation.get("eos_token_id")
    if given is None:
        given = raw.get("eos_token_id")
    if isinstance(given, list):
        given = given[0] if given else None
    return given if isinstance(given, int) else None


def _defaults(generation: dict[str, Any]) -> dict[str, float]:
    """The model's own sampling parameters, for requests that do not set them."""
    given = {number.name: generation.get(number.name) for number in NUMBERS}
    return {name: value for name, value in given.items() if isinstance(value, int | float)}


def _read_if_there(path: Path) -> dict[str, Any]:
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise SetupError(f"{path} cannot be read: it is not a JSON object")
    return raw
