"""A Hugging Face model in transformers, on the CPU, with attention "zinc". Nothing is ever downloaded."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, DeviceMemoryError, LimitError, UnsupportedError, ZincAttnError
from ..models import read_config


@dataclass(frozen=True)
class HFModel:
    """A transformers model in evaluation mode with attention "zinc". nbytes: of its weights."""

    name: str
    model: Any
    nbytes: int

    @property
    def config(self) -> Any:
        """The config of the text part."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> Any:
        """The torch dtype of keys and values."""
        return self.model.dtype

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        given = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        given = self.config.eos_token_id if given is None else given
        return frozenset(given if isinstance(given, (list, tuple)) else () if given is None else (given,))

    @property
    def max_positions(self) -> int | None:
        """The most tokens that the config allows; None where it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def check_positions(self, tokens: int, what: str) -> None:
        """LimitError for more tokens than the config allows."""
        most = self.max_positions
        if most is not None and tokens > most:
            raise LimitError(
                f"{what}: got {tokens:,} tokens, expected at most max_position_embeddings = {most:,} of {self.name}"
            )

    def logits(self, ids: Any, cache: Any) -> Any:
        """Run one forward of token ids (1, n) on a ZincCache, and return the last one's float32 logits (vocab,).

        UnsupportedError: what the model's own code raises.
        """
        keeps_few = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        arguments = {"logits_to_keep": 1} if keeps_few else {}
        try:
            made = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)
        except (ZincAttnError, MemoryError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {_one_line(error)}"
            raise UnsupportedError(f"model: a forward of {type(self.model).__name__} failed: {text}") from error
        return made.logits[0, -1].float()

    def describe(self) -> str:
        """How many attention layers of which shape it has, and how many others."""
        hf = integration()
        with hf.ZincCache(self.model.config, 1) as cache:
            shapes = [str(layer.shape) for layer in cache.layers if isinstance(layer, hf.ZincLayer)]
            others = len(cache.layers) - len(shapes)
        counts = {one: shapes.count(one) for one in shapes}
        text = ", ".join(f"{n} attention layer{'s' if n > 1 else ''} {one}" for one, n in counts.items())
        return f"{text} and {others} others" if others else text


def integration() -> Any:
    """``zinc_attn.integrations.transformers``, with "zinc" registered. RuntimeUnavailableError names the extra."""
    from ...integrations import transformers as hf

    hf.register()
    return hf


def load_model(path: str | Path) -> HFModel:
    """The checkpoint in folder ``path``: config.json and safetensors files.

    ArgumentError: no such folder, or a file that is missing, broken, or lacks weights. UnsupportedError: an
    architecture that transformers, or attention "zinc", does not do. DeviceMemoryError: more weights than the host's
    memory.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ArgumentError(
            f"model: got {str(path)!r}, expected a folder with config.json and *.safetensors; nothing is downloaded"
        )
    _model_type(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern))
        raise ArgumentError(
            f"model: {folder} has {', '.join(others) or 'no weights'}, expected safetensors files (*.safetensors)"
        )
    nbytes = sum(file.stat().st_size for file in files)
    hf = integration()
    from transformers import AutoModelForCausalLM

    with quiet(), _refusing(f"model: cannot load {folder}"):
        config = _config(folder)
        check_memory(nbytes, "its weights")
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto",
            attn_implementation=hf.NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # _check_weights refuses them by name
        )
    _check_weights(folder, type(model).__name__, report)
    return HFModel(folder.resolve().name, model.eval(), nbytes)


def _check_weights(folder: Path, architecture: str, report: dict[str, Any]) -> None:
    """Refuse weights that are missing or have other shapes than the config says."""
    if wrong := sorted(report["mismatched_keys"]):
        name, got, expected = wrong[0]
        raise ArgumentError(
            f"model: {folder} has {len(wrong)} weights of other shapes than its config.json says, the first {name}: "
            f"got {tuple(got)}, expected {tuple(expected)}"
        )
    if lacking := sorted(report["missing_keys"]):
        raise ArgumentError(
            f"model: {folder} lacks {len(lacking)} weights of {architecture}, the first {lacking[0]}; "
            "expected all of them"
        )


def build_model(path: str | Path, seed: int = 0) -> HFModel:
    """A model with seeded random weights from a Hugging Face config.json. Errors as ``load_model``."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    _model_type(file)
    hf = integration()
    import torch
    from transformers import AutoModelForCausalLM

    with quiet(), _refusing(f"config: cannot build a model from {file}"):
        config = _config(file)
        options = {"attn_implementation": hf.NAME, "dtype": config.dtype or torch.float32, "trust_remote_code": False}
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, **options)
        nbytes = sum(one.numel() * one.element_size() for one in empty.parameters())
        check_memory(nbytes, "random weights")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, **options)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return HFModel(name, model.eval(), nbytes)


def load_tokenizer(path: str | Path) -> Any | None:
    """The tokenizer in a checkpoint's folder; None where it has no files of one. ArgumentError: they are broken."""
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")
    if not any((folder / name).is_file() for name in names):
        return None
    integration()
    from transformers import AutoTokenizer

    with quiet(), _refusing(f"model: cannot load the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _model_type(path: Path) -> str:
    """The model_type that a config.json states."""
    file, data = read_config(path)
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ArgumentError(f"model: {file} has no model_type, expected a Hugging Face config.json")
    return str(data["model_type"])


def _config(path: Path) -> Any:
    """The config of a folder or file, of a model that a ZincCache serves."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if (kind := _model_type(path)) not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"got model_type {kind!r}, which transformers {transformers.__version__} does not know; a checkpoint's own "
            "code is never run"
        )
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(f"got model_type {config.model_type!r}, expected a causal language model")
    if getattr(config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedError("got kv_lora_rank: latent attention (MLA), expected grouped-query attention")
    integration().ZincCache(config, 1).close()  # refuses layers that it does not serve, before weights are read
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' notes and progress bars."""
    from transformers.utils import logging as notes

    level, bars = notes.get_verbosity(), notes.is_progress_bar_enabled()
    notes.set_verbosity(logging.ERROR)
    notes.disable_progress_bar()
    try:
        yield
    finally:
        notes.set_verbosity(level)
        if bars:
            notes.enable_progress_bar()


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn errors of transformers, safetensors and torch into typed ones that begin with ``what``."""
    try:
        yield
    except ZincAttnError as error:
        raise type(error)(f"{what}: {error}") from error
    except MemoryError as error:
        raise DeviceMemoryError(f"{what}: no room in host memory") from error
    except Exception as error:  # what these libraries raise is not documented
        raise UnsupportedError(f"{what}: {_one_line(error) or type(error).__name__}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def check_memory(nbytes: int, what: str) -> None:
    """DeviceMemoryError where the host has less memory available. Where that is not known, nothing is refused."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    if found and nbytes > found[0]:
        raise DeviceMemoryError(
            f"{what} take {nbytes:,} bytes, expected at most the {found[0]:,} that this host has left"
        )
