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

from ...errors import ArgumentError, UnsupportedError
from ...files import check_entries
from ..harness.progress import Progress
from ..models import read_config
from .gguf_file import check_scaling, find_gguf, read_header, reading
from .hf_model import HFModel, check_memory, integration, quiet, refusing

LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}  # nothing is downloaded, no other code is run


def load_checkpoint(
    path: str | Path, *, float32: bool = False, tokenizer: bool = True, progress: Progress | None = None
) -> tuple[HFModel, Any | None]:
    """The model and the tokenizer of a checkpoint: a folder with config.json and safetensors files, or a GGUF file.

    path: the folder, or the GGUF file or its folder. float32: with the weights as float32, whatever dtype they have in
    safetensors files. tokenizer: load it, too; None where there is none.
    ArgumentError: no such folder or file, or one that is missing, broken, or lacks weights. UnsupportedError: an
    architecture that transformers, or attention "zinc", does not do. DeviceMemoryError: more weights than the host's
    memory. RuntimeUnavailableError: packages are missing.
    """
    given = Path(path)
    file = find_gguf(given)
    if not file and not os.path.isdir(given):
        raise ArgumentError(
            f"model: got {str(path)!r}, expected a folder with config.json and *.safetensors, or a GGUF file; nothing "
            "is downloaded"
        )
    if progress:
        progress(f"reading {given.name}", 0, 0)
    with reading(file, progress) if file else nullcontext():
        model = _load_gguf(file) if file else _load_folder(given, float32)
        if progress:
            progress(f"reading the tokenizer of {given.name}", 1, 1)
        return model, load_tokenizer(path) if tokenizer else None


def load_model(path: str | Path, *, float32: bool = False) -> HFModel:
    """The model of ``load_checkpoint`` alone."""
    return load_checkpoint(path, float32=float32, tokenizer=False)[0]


def load_tokenizer(path: str | Path) -> Any | None:
    """The tokenizer of the checkpoint at ``path``; None where it has none. ArgumentError: its files are broken."""
    given = Path(path)
    if (file := find_gguf(given)) is None:
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")
        return _tokenizer(given) if any((given / name).is_file() for name in names) else None
    with reading(file):
        return _tokenizer(file.parent, gguf_file=file.name) if read_header(file).has_tokenizer else None


def build_model(path: str | Path, seed: int = 0) -> HFModel:
    """A model with seeded random weights from a Hugging Face config.json. Errors as ``load_checkpoint``."""
    file = Path(path)
    file = file / "config.json" if os.path.isdir(file) else file
    _model_type(file)
    integration()
    import torch
    from transformers import AutoModelForCausalLM

    with quiet(), refusing(f"config: cannot build a model from {file}"):
        config = _read_config(file)
        dtype = config.dtype or torch.float32
        check_memory(_weights_bytes(config, dtype), "random weights")
        options = {"attn_implementation": _implementation(config), "dtype": dtype}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, **options)
        return _attending(file.resolve().parent.name if file.name == "config.json" else file.stem, model)


def _load_folder(folder: Path, float32: bool) -> HFModel:
    _model_type(folder / "config.json")
    check_entries(folder, "regular files")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        raise ArgumentError(
            f"model: {folder} has {', '.join(others) or 'no weights'}, expected safetensors files (*.safetensors)"
        )
    integration()
    import torch

    with quiet(), refusing(f"model: cannot load {folder}"):
        config = _read_config(folder)
        stored = sum(file.stat().st_size for file in files)
        check_memory(_weights_bytes(config, torch.float32) if float32 else stored, "its weights")
        options = {"dtype": torch.float32 if float32 else "auto", "use_safetensors": True}
        return _loaded(folder, folder.resolve().name, config, **options)


def _load_gguf(file: Path) -> HFModel:
    header = read_header(file)
    integration()
    import torch
    import transformers

    known = f"which transformers {transformers.__version__} does not load from a GGUF file"
    with quiet():
        with refusing(f"model: {file} has architecture {header.architecture!r}, {known}"):
            config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        with refusing(f"model: cannot load {file}"):
            _check_config(config)
            check_scaling(header, config)
            check_memory(_weights_bytes(config, torch.float32), "its weights, unpacked to float32,")
            with redirect_stderr(io.StringIO()):  # a progress bar that no option of transformers turns off
                return _loaded(file.parent, file.stem, config, dtype=torch.float32, gguf_file=file.name)


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
    if lacking := sorted(report["missing_keys"]):
        kind = type(model).__name__
        raise ArgumentError(f"it lacks {len(lacking)} weights of {kind}, the first {lacking[0]}; expected all of them")
    return _attending(name, model)


def _implementation(config: Any) -> str:
    """The attn_implementation to make a model with: "zinc" unless ``_attending`` is what makes it attend through it."""
    hf = integration()
    return "eager" if config.model_type in hf.ADAPTABLE else str(hf.NAME)


def _attending(name: str, model: Any) -> HFModel:
    """A model made with ``_implementation``, in evaluation mode, with attention "zinc"."""
    hf = integration()
    if model.config.model_type in hf.ADAPTABLE:
        hf.adapt(model)
    return HFModel(name, model.eval())


def _tokenizer(folder: Path, **options: Any) -> Any:
    integration()
    from transformers import AutoTokenizer

    with quiet(), refusing(f"model: cannot load the tokenizer in {folder / options.get('gguf_file', '')}"):
        return AutoTokenizer.from_pretrained(folder, **LOCAL, **options)


def _model_type(path: Path) -> str:
    """The model_type that a config.json states."""
    file, data = read_config(path)
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ArgumentError(f"model: {file} has no model_type, expected a Hugging Face config.json")
    return str(data["model_type"])


def _read_config(path: Path) -> Any:
    """The config of a folder or file, of a model that a ZincCache serves."""
    import transformers

    if (kind := _model_type(path)) not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"got model_type {kind!r}, which transformers {transformers.__version__} does not know; a checkpoint's own "
            "code is never run"
        )
    config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    _check_config(config)
    return config


def _check_config(config: Any) -> None:
    """Refuse a model that a ZincCache does not serve, before its weights are read."""
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(f"got model_type {config.model_type!r}, expected a causal language model")
    integration().ZincCache(config, 1).close()  # refuses layers that it does not serve


def _weights_bytes(config: Any, dtype: Any) -> int:
    """Bytes of the weights of a config's model in a dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, attn_implementation=_implementation(config), dtype=dtype)
    return sum(one.numel() * one.element_size() for one in empty.parameters())
