"""Checkpoints on the disk, as models and tokenizers of transformers. Nothing is ever downloaded.

A checkpoint is a folder with config.json, safetensors and tokenizer files, or a GGUF file, which has all of these
inside and which transformers' own loader unpacks to float32.
"""

from __future__ import annotations

import io
import os
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, Final

from ...errors import ArgumentError
from ...files import check_entries
from ..models import config_name, read_config
from .gguf_file import check_scaling, parsed_once, read_header
from .hf_model import HFModel, integration, quiet, refusing

LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}  # nothing is downloaded, no other code is run
TOKENIZERS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json"


def load_checkpoint(path: str | Path, *, float32: bool = False, tokenizer: bool = True) -> tuple[HFModel, Any | None]:
    """The model and the tokenizer, None where there is none, of a checkpoint: a folder or a GGUF file.

    float32: with the weights as float32, whatever dtype they have in safetensors files. tokenizer: load it, too.
    ArgumentError: no such folder or file, or one that is missing, broken, or lacks weights. UnsupportedError: an
    architecture that transformers, or attention "zinc", does not do. RuntimeUnavailableError: packages are missing.
    """
    given = Path(path)
    is_gguf = given.suffix == ".gguf" and os.path.isfile(given)
    if not is_gguf and not os.path.exists(given / "config.json"):
        raise ArgumentError(
            f"model: got {str(path)!r}, expected a folder with config.json and *.safetensors, or a GGUF file; nothing "
            "is downloaded"
        )
    with parsed_once(given) if is_gguf else nullcontext():
        model = _load_gguf(given) if is_gguf else _load_folder(given, float32)
        return model, load_tokenizer(path) if tokenizer else None


def load_model(path: str | Path, *, float32: bool = False) -> HFModel:
    """The model of ``load_checkpoint`` alone."""
    return load_checkpoint(path, float32=float32, tokenizer=False)[0]


def load_tokenizer(path: str | Path) -> Any | None:
    """The tokenizer of the checkpoint at ``path``; None where it has none. UnsupportedError: its files are broken."""
    given = Path(path)
    if os.path.isfile(given):
        with parsed_once(given):
            found = "tokenizer.ggml.model" in read_header(given)
            return _tokenizer(given.parent, gguf_file=given.name) if found else None
    return _tokenizer(given) if any((given / name).is_file() for name in TOKENIZERS) else None


def _tokenizer(folder: Path, **options: Any) -> Any:
    integration()
    from transformers import AutoTokenizer

    with quiet(), refusing(f"model: cannot load the tokenizer in {folder / options.get('gguf_file', '')}"):
        return AutoTokenizer.from_pretrained(folder, **LOCAL, **options)


def build_model(path: str | Path, seed: int = 0) -> HFModel:
    """A model with seeded random weights from a Hugging Face config.json. Errors as ``load_checkpoint``."""
    file, _ = read_config(path)
    integration()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet(), refusing(f"config: cannot build a model from {path}"), torch.random.fork_rng(devices=[]):
        config = AutoConfig.from_pretrained(file, **LOCAL)
        torch.manual_seed(seed)
        options = {"attn_implementation": _implementation(config), "dtype": config.dtype or torch.float32}
        return _attending(config_name(file), AutoModelForCausalLM.from_config(config, **options))


def _load_folder(folder: Path, float32: bool) -> HFModel:
    file, _ = read_config(folder)
    check_entries(folder, "regular files")
    integration()
    from transformers import AutoConfig

    with quiet(), refusing(f"model: cannot load {folder}"):
        config, dtype = AutoConfig.from_pretrained(file, **LOCAL), "float32" if float32 else "auto"
        return _loaded(folder, folder.resolve().name, config, dtype=dtype, use_safetensors=True)


def _load_gguf(file: Path) -> HFModel:
    header = read_header(file)
    integration()
    from transformers import AutoConfig

    with quiet(), refusing(f"model: cannot load {file}"):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        check_scaling(header, config)
        with redirect_stderr(io.StringIO()):  # a progress bar that no option of transformers turns off
            return _loaded(file.parent, file.stem, config, dtype="float32", gguf_file=file.name)


def _loaded(folder: Path, name: str, config: Any, **options: Any) -> HFModel:
    """The model of ``config`` with the weights in ``folder``, every one of which must be there, in its shape."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        attn_implementation=_implementation(config),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused by name
        **LOCAL,
        **options,
    )
    if wrong := sorted(report["mismatched_keys"]):
        first, got, expected = wrong[0]
        raise ArgumentError(
            f"it has {len(wrong)} weights of other shapes than its config says, the first {first}: "
            f"got {tuple(got)}, expected {tuple(expected)}"
        )
    if lacking := sorted(report["missing_keys"]):  # transformers initialises them at random
        kind = type(model).__name__
        raise ArgumentError(f"it lacks {len(lacking)} weights of {kind}, the first {lacking[0]}; expected all of them")
    return _attending(name, model)


def _implementation(config: Any) -> str:
    """The attn_implementation to make a model with: "zinc" unless ``_attending`` is what makes it attend through it."""
    hf = integration()
    hf.ZincCache(config, 1).close()  # refuses a layer that it does not serve, before any weight is read
    return "eager" if config.model_type in hf.ADAPTABLE else str(hf.NAME)


def _attending(name: str, model: Any) -> HFModel:
    """A model made with ``_implementation``, in evaluation mode, with attention "zinc"."""
    if model.config.model_type in integration().ADAPTABLE:
        integration().adapt(model)
    return HFModel(name, model.eval())
