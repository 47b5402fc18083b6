"""Whole models on a ZincCache: generation, its self-check, and the validation of decode at long contexts.

A model runs in transformers on the CPU, its attention on the Vulkan device. What differs between two runs is put down
to the side it comes from: as long as every attention call got the same q, k and v, a different output is ours; where q,
k or v differ first, or the logits after equal attention, the model's own arithmetic has moved.

``validate`` does without a prefill: keys and values of the context are seeded normal values that go straight into the
cache, linear-attention layers begin with a fresh state, and the last STEPS positions are decoded on fixed token ids.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..cache import rows
from ..checks import check_int
from ..errors import ArgumentError, DeviceMemoryError, LimitError, UnsupportedError, ZincAttnError
from ..runtime.device import Device
from ..shapes import AttnShape, dtype_bytes
from .sweep import PAGE_SIZE, Layout, Progress, difference

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

NAME: Final = "zinc_watched"  # attention "zinc" under a clock, see Watch
STEPS: Final = 16  # positions that validate decodes
LAYOUTS: Final = "1,2,8,64,auto,size:256,size:2048"  # of validate; the first of all is always the single split
CONTEXTS: Final = "8k,32k,128k"
BOUND: Final = 5e-6  # relative L2 error of a layer's attention outputs against float64 that validate lets pass
CHECK_LAYOUTS: Final = ("1", "8", "auto", "size:256")
CHECK_PAGES: Final = (16, 64, 256)
CHECK_CHUNKS: Final = (1, 7, 64, None)  # None: the whole prompt at once
ONE_BY_ONE: Final = 256  # prompt tokens at most that the self-check feeds one by one
BLOCK: Final = 4096  # tokens of seeded values that are made together
REFERENCE_BLOCK: Final = 2048  # keys that the float64 reference takes at a time
_MASKED: Final = -1e300  # a float64 score that weighs nothing beside a real one


# --- the model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A transformers model in evaluation mode with attention "zinc". nbytes: of its weights; dtype: torch's."""

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

    def check_positions(self, tokens: int, what: str) -> None:
        """Refuse more tokens than the config allows."""
        most = getattr(self.config, "max_position_embeddings", None)
        if most is not None and tokens > most:
            raise LimitError(
                f"{what}: got {tokens:,} tokens, expected at most max_position_embeddings = {most:,} of {self.name}"
            )

    def logits(self, ids: Any, cache: Any) -> Any:
        """One forward of token ids (1, n) on a ZincCache: float32 logits (vocab,) of the last.

        UnsupportedError: what the model's own code raises.
        """
        arguments = {"logits_to_keep": 1} if self._keeps_few else {}
        try:
            made = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)
        except (ZincAttnError, MemoryError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            raise UnsupportedError(f"model: a forward of {type(self.model).__name__} failed: {text}") from error
        return made.logits[0, -1].float()

    @property
    def _keeps_few(self) -> bool:
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters


def integration() -> Any:
    """``zinc_attn.integrations.transformers``, with NAME registered. RuntimeUnavailableError names the extra."""
    from ..integrations import transformers as hf

    hf.register()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, watched_attention)
    AttentionMaskInterface.register(NAME, hf.attention_mask)
    return hf


def load_model(path: str | Path) -> Host:
    """The checkpoint in folder ``path``: config.json and safetensors files. Nothing is ever downloaded.

    ArgumentError: no such folder, a file that is missing, broken, or lacks weights; UnsupportedError: an architecture
    that transformers, or attention "zinc", does not do; DeviceMemoryError: more weights than the host's memory.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ArgumentError(
            f"model: got {str(path)!r}, expected a folder with config.json and *.safetensors; nothing is downloaded"
        )
    _read_config(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern))
        raise ArgumentError(
            f"model: {folder} has {', '.join(others) or 'no weights'}, expected safetensors files (*.safetensors)"
        )
    nbytes = sum(file.stat().st_size for file in files)
    integration()
    from transformers import AutoModelForCausalLM

    with _quiet(), _refusing(f"model: cannot load {folder}"):
        config = _config(folder)
        _check_memory(nbytes, "its weights")
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto",
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, got, expected = wrong[0]
        raise ArgumentError(
            f"model: {folder} has {len(wrong)} weights of other shapes than its config.json says, the first {name}: "
            f"got {tuple(got)}, expected {tuple(expected)}"
        )
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ArgumentError(
            f"model: {folder} lacks {len(lacking)} weights of {type(model).__name__}, the first {lacking[0]}; "
            "expected all of them"
        )
    return Host(folder.resolve().name, model.eval(), nbytes)


def build_model(path: str | Path, seed: int = 0) -> Host:
    """A model with seeded random weights from a Hugging Face config.json. Errors as ``load_model``."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    _read_config(file)
    integration()
    import torch
    from transformers import AutoModelForCausalLM

    with _quiet(), _refusing(f"config: cannot build a model from {file}"):
        config = _config(file)
        options = {"attn_implementation": NAME, "dtype": config.dtype or torch.float32, "trust_remote_code": False}
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, **options)
        nbytes = sum(one.numel() * one.element_size() for one in empty.parameters())
        _check_memory(nbytes, "random weights")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, **options)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return Host(name, model.eval(), nbytes)


def describe(host: Host) -> str:
    """How many attention layers of which shape, and how many others."""
    hf = integration()
    with hf.ZincCache(host.model.config, 1) as cache:
        shapes = [str(layer.shape) for layer in cache.layers if isinstance(layer, hf.ZincLayer)]
        others = len(cache.layers) - len(shapes)
    counts = {one: shapes.count(one) for one in shapes}
    text = ", ".join(f"{n} attention layer{'s' if n > 1 else ''} {one}" for one, n in counts.items())
    return f"{text} and {others} others" if others else text


def load_tokenizer(path: str | Path) -> Any | None:
    """The tokenizer in a checkpoint's folder; None where there are no files of one. ArgumentError: broken ones."""
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")
    if not any((folder / name).is_file() for name in names):
        return None
    integration()
    from transformers import AutoTokenizer

    with _quiet(), _refusing(f"model: cannot load the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _read_config(file: Path) -> dict[str, Any]:
    """The JSON object of a config.json."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"model: cannot read {file}: {error.strerror}; expected a Hugging Face config.json"
        raise ArgumentError(text) from error
    except ValueError as error:
        raise ArgumentError(f"model: {file} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ArgumentError(f"model: {file} has no model_type, expected a Hugging Face config.json")
    return data


def _config(path: Path) -> Any:
    """The config of a folder or file, of a model that a ZincCache serves."""
    hf = integration()
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    kind = _read_config(path / "config.json" if path.is_dir() else path)["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"got model_type {kind!r}, which transformers {transformers.__version__} does not know; a checkpoint's own "
            "code is never run"
        )
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedError(f"got model_type {config.model_type!r}, expected a causal language model")
    if getattr(config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedError("got kv_lora_rank: latent attention (MLA), expected grouped-query attention")
    hf.ZincCache(config, 1).close()  # refuses what is no layer of ours, before weights are read
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' notes and bars."""
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
    """Errors of transformers, safetensors and torch as ones of ours that begin with ``what``."""
    try:
        yield
    except ZincAttnError as error:
        raise type(error)(f"{what}: {error}") from error
    except MemoryError as error:
        raise DeviceMemoryError(f"{what}: no room in host memory") from error
    except Exception as error:  # what these libraries raise is not documented
        text = " ".join(str(error).split())
        raise UnsupportedError(f"{what}: {text[:400] or type(error).__name__}") from error


def _check_memory(nbytes: int, what: str) -> None:
    """DeviceMemoryError where the host has less memory available; where that is not known, nothing."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    if found and nbytes > found[0]:
        raise DeviceMemoryError(
            f"{what} take {nbytes:,} bytes, expected at most the {found[0]:,} that this host has left"
        )


# --- watching attention ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer's attention. inputs: digest of q and the new k and v; the arrays only where they are kept.

    q, out: float32 (q_len, q_heads, head_dim); k, v: torch tensors (kv_heads, q_len, head_dim) of the model's dtype,
    None where the module attends the rows of an earlier call.
    """

    layer: int
    inputs: bytes
    output: bytes
    q: F32 | None = None
    k: Any = None
    v: Any = None
    out: F32 | None = None
    options: Any = None  # scale, window, softcap, sinks


@dataclass(eq=False)
class Step:
    """A forward: its attention calls, and float32 logits (vocab,) of its last token."""

    calls: list[Call] = field(default_factory=list)
    logits: Any = None


class Watch:
    """Times the attention of the caches it is attached to; ``trace``: keeps digests of it; ``keep``: arrays, too."""

    def __init__(self, *, trace: bool = False, keep: bool = False) -> None:
        self.trace, self.keep = trace or keep, keep
        self.seconds = 0.0  # in the attention function
        self.steps_s: list[float] = []  # of that, per step
        self.steps: list[Step] = [Step()]
        self.aside = 0.0  # seconds of the watch itself

    def attach(self, cache: Any) -> None:
        """Watch a ZincCache, one batch row."""
        for layer in cache.layers:
            if hasattr(layer, "attend"):
                layer.watch = self
                layer.attend = partial(self._attend, layer, layer.attend)

    def end_step(self, logits: Any) -> None:
        """The forward gave these logits."""
        self.steps_s.append(self.seconds - sum(self.steps_s))
        if self.trace:
            self.steps[-1].logits = logits
            self.steps.append(Step())

    def _attend(self, layer: Any, attend: Callable[..., F32], query: Any, *rest: Any) -> F32:
        begin = perf_counter()
        pending, options = layer.pending, rest[-1]
        if not self.trace:
            return attend(query, *rest)
        arrays = [x.detach().to("cpu").float().contiguous().numpy() for x in (query, *(pending or ()))]
        inputs = _digest(*arrays)
        self.aside += perf_counter() - begin
        out = attend(query, *rest)
        begin = perf_counter()
        call = Call(layer.index, inputs, _digest(out))
        if self.keep:
            q = np.ascontiguousarray(arrays[0][0].transpose(1, 0, 2))
            k, v = (x[0].detach().to("cpu") for x in pending) if pending else (None, None)
            call = Call(layer.index, inputs, call.output, q, k, v, out[0].copy(), options)
        self.steps[-1].calls.append(call)
        self.aside += perf_counter() - begin
        return out


def watched_attention(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
    """The attention function of "zinc" under the clock of the Watch that the key's cache has, if any."""
    from ..integrations.transformers import attention_forward

    watch = getattr(getattr(key, "layer", None), "watch", None)
    if watch is None:
        return attention_forward(module, query, key, *args, **kwargs)
    begin, aside = perf_counter(), watch.aside
    out = attention_forward(module, query, key, *args, **kwargs)
    watch.seconds += perf_counter() - begin - (watch.aside - aside)
    return out


def _digest(*arrays: Any) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for array in arrays:
        made.update(np.ascontiguousarray(array).data)
    return made.digest()


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part. ours: attention gave other bits on the same q, k and v."""

    ours: bool
    text: str


def first_difference(got: Sequence[Step], want: Sequence[Step]) -> Difference | None:
    """None where every attention output and all logits have the same bits."""
    host = "the model's own arithmetic moved"
    for step, (a, b) in enumerate(zip_longest(got, want, fillvalue=Step())):
        for one, other in zip_longest(a.calls, b.calls):
            if one is None or other is None:
                return Difference(False, f"step {step}: another number of attention calls")
            where = f"step {step}, layer {other.layer}"
            if one.inputs != other.inputs:
                return Difference(False, f"{where}: q, k or v differ after equal attention: {host}")
            if one.output != other.output:
                text: str | None = "outputs differ"
                if one.out is not None and other.out is not None:
                    text = difference("out", one.out, other.out)
                return Difference(True, f"{where}: {text} on equal q, k and v")
        if not _same_bits(a.logits, b.logits):
            return Difference(False, f"step {step}: logits differ after equal attention: {host}")
    return None


def _same_bits(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a.numpy().view(np.uint32), b.numpy().view(np.uint32)))


# --- generation --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How to generate. prefill_chunk: prompt tokens per forward, None for all; dtype, page_size: of the cache;
    capacity: tokens, None for what is needed; num_splits, split_size: a fixed layout. ArgumentError.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    prefill_chunk: int | None = None
    dtype: str | None = None
    page_size: int = PAGE_SIZE
    num_splits: int | None = None
    split_size: int | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1)
        check_int("seed", self.seed, 0)
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ArgumentError(f"temperature: got {self.temperature!r}, expected a finite number of at least 0")
        for name in ("prefill_chunk", "num_splits", "split_size", "capacity"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.num_splits is not None and self.split_size is not None:
            raise ArgumentError("num_splits, split_size: got both, expected at most one")
        check_int("page_size", self.page_size, 16)
        if self.dtype is not None:
            dtype_bytes(self.dtype)

    def tokens(self, prompt: int) -> int:
        """Tokens that the cache must hold; the last new one never enters it. ArgumentError beyond ``capacity``."""
        needed = prompt + self.max_new_tokens - 1
        if self.capacity is not None and self.capacity < needed:
            raise ArgumentError(
                f"capacity: got {self.capacity:,}, expected at least {needed:,} for {prompt:,} prompt tokens and "
                f"{self.max_new_tokens:,} new ones"
            )
        return self.capacity or needed


@dataclass(frozen=True)
class Generation:
    """What came out. Times in seconds; decode: the forwards of single tokens, choosing the next one included.

    stopped: "length" or "eos"; margins: by how much the best logit led at each id.
    """

    ids: list[int]
    prompt_tokens: int
    stopped: str
    dtype: str
    prefill_s: float
    decode_s: float
    prefill_attention_s: float
    decode_attention_s: float
    steps_s: list[float]
    margins: list[float]

    @property
    def figures(self) -> dict[str, Any]:
        """Tokens per second and attention's share of decode; None where nothing was decoded."""
        decoded = len(self.steps_s)
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.ids),
            "prefill_s": self.prefill_s,
            "prefill_tokens_s": self.prompt_tokens / self.prefill_s,
            "decode_s": self.decode_s,
            "decode_tokens_s": decoded / self.decode_s if decoded else None,
            "median_step_ms": 1e3 * float(np.median(self.steps_s)) if decoded else None,
            "attention_share": self.decode_attention_s / self.decode_s if decoded else None,
        }


def generate(
    host: Host,
    device: Device,
    prompt: Sequence[int],
    settings: Settings,
    *,
    on_token: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    chunks: Sequence[int] | None = None,
) -> Generation:
    """Prefill ``prompt`` (token ids) in chunks, then decode until a stop id or max_new_tokens.

    on_token: called with each new id; chunks: sizes of the prompt's chunks in place of settings.prefill_chunk.
    Temperature 0 takes the best logit; otherwise ids are drawn from a generator of settings.seed.
    ArgumentError: an empty prompt, an id that the vocabulary lacks, a capacity that is too small.
    """
    import torch

    hf = integration()
    vocab = host.config.vocab_size
    if not prompt:
        raise ArgumentError("prompt: got no token, expected at least one")
    for one in prompt:
        check_int("prompt", one, 0, vocab - 1)
    needed = settings.tokens(len(prompt))
    host.check_positions(len(prompt) + settings.max_new_tokens, "prompt, max_new_tokens")
    if chunks is None:
        size = settings.prefill_chunk or len(prompt)
        chunks = [min(size, len(prompt) - at) for at in range(0, len(prompt), size)]
    watch = Watch() if watch is None else watch
    draw = torch.Generator().manual_seed(settings.seed)
    ids: list[int] = []
    steps_s: list[float] = []
    margins: list[float] = []

    def choose(logits: Any) -> int:
        watch.end_step(logits)
        best = logits.topk(2).values
        margins.append(float(best[0] - best[1]))
        if settings.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(logits / settings.temperature, -1), 1, generator=draw))

    layout = {"num_splits": settings.num_splits, "split_size": settings.split_size}
    options = {"device": device, "dtype": settings.dtype, "page_size": settings.page_size, **layout}
    with hf.ZincCache(host.model.config, needed, **options) as cache, torch.no_grad(), _quiet():
        cache.allocate(host.dtype)
        watch.attach(cache)
        given = torch.tensor([list(prompt)])
        begin = perf_counter()
        for part in given.split(list(chunks), dim=1):
            logits = host.logits(part, cache)
        ids.append(choose(logits))
        prefill_s, prefill_attention_s = perf_counter() - begin - watch.aside, watch.seconds
        if on_token:
            on_token(ids[-1])
        while len(ids) < settings.max_new_tokens and ids[-1] not in host.stop_ids:
            begin, aside = perf_counter(), watch.aside
            ids.append(choose(host.logits(torch.tensor([[ids[-1]]]), cache)))
            steps_s.append(perf_counter() - begin - (watch.aside - aside))
            if on_token:
                on_token(ids[-1])
        dtype = cache.caches[0].dtype
    return Generation(
        ids,
        len(prompt),
        "eos" if ids[-1] in host.stop_ids else "length",
        dtype,
        prefill_s,
        sum(steps_s),
        prefill_attention_s,
        watch.seconds - prefill_attention_s,
        steps_s,
        margins,
    )


class TextStream:
    """Token ids to text, in whole characters, as they come. before: the prompt's ids, which tell where words begin."""

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(before[-6:])
        self.first, self.shown = 0, len(self.ids)

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty inside a character."""
        self.ids.append(token)
        text = self._text(self.ids[self.first :])
        if text.endswith("\ufffd"):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """What is left."""
        return self._emit(self._text(self.ids[self.first :]))

    def _emit(self, text: str) -> str:
        before = self._text(self.ids[self.first : self.shown])
        self.first, self.shown = self.shown, len(self.ids)
        return text[len(before) :]


# --- the self-check ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A run of the self-check beside the first one.

    kind: layout, page size (the same chunks: every bit must be equal) or chunks (token ids are compared; a CPU's matrix
    product may round differently for another number of rows). status: "equal", "ids differ", "host differs" or
    "DIFFERENT"; only the last one is ours.
    """

    kind: str
    value: str
    status: str
    bits_equal: bool | None  # of attention and logits; None for chunks
    ids_equal: bool
    text: str = ""


def selfcheck(
    host: Host,
    device: Device,
    prompt: Sequence[int],
    settings: Settings,
    want: Generation,
    traced: Watch,
    progress: Progress | None = None,
) -> list[Check]:
    """Generate again with other layouts, page sizes and prefill chunks, and compare with ``settings``' own run.

    want, traced: that run, and the tracing Watch that it was given.
    """
    runs: list[tuple[str, str, Settings, list[int] | None]] = []
    for text in CHECK_LAYOUTS:
        layout = Layout.parse(text)
        other = _with(settings, num_splits=layout.num_splits, split_size=layout.split_size)
        runs.append(("layout", text, other, None))
    runs += [("page size", str(size), _with(settings, page_size=size), None) for size in CHECK_PAGES]
    for size in CHECK_CHUNKS:
        if size is not None and size >= len(prompt):
            continue  # the same as all at once
        sizes, label = chunk_sizes(len(prompt), size)
        runs.append(("chunks", label, settings, sizes))
    found = []
    for i, (kind, value, other, chunks) in enumerate(runs):
        if progress:
            progress(f"{kind} {value}", i, len(runs))
        watch = Watch(trace=kind != "chunks")
        got = generate(host, device, prompt, other, watch=watch, chunks=chunks)
        equal = got.ids == want.ids
        if kind == "chunks":
            text = "" if equal else _ids_differ(got, want)
            found.append(Check(kind, value, "equal" if equal else "ids differ", None, equal, text))
        else:
            part = first_difference(watch.steps, traced.steps)
            status = "equal" if part is None else "DIFFERENT" if part.ours else "host differs"
            found.append(Check(kind, value, status, part is None, equal, part.text if part else ""))
    return found


def chunk_sizes(tokens: int, size: int | None) -> tuple[list[int], str]:
    """Sizes of the chunks of a prompt, and their name. Beyond ONE_BY_ONE tokens only the last ones go one by one."""
    if size is None:
        return [tokens], "all"
    head = tokens - ONE_BY_ONE if size == 1 else 0
    if head > 0:
        sizes, _ = chunk_sizes(head, 64)
        return [*sizes, *[1] * ONE_BY_ONE], f"1 (the last {ONE_BY_ONE}, by 64 before)"
    return [min(size, tokens - at) for at in range(0, tokens, size)], str(size)


def _with(settings: Settings, **changes: Any) -> Settings:
    return Settings(**{**asdict(settings), **changes})


def _ids_differ(got: Generation, want: Generation) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=False)) if a != b), len(got.ids))
    margin = want.margins[min(at, len(want.margins) - 1)]
    return f"from new token {at} on, where the best logit led by {margin:.3g}"


# --- validation --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutResult:
    """Decode of the last STEPS positions with one layout, beside a single split. Times: median of the steps, ms.

    status: "baseline", "equal", "host differs" (the model's own arithmetic) or "DIFFERENT".
    """

    layout: str
    splits: int
    status: str
    step_ms: float
    attention_ms: float
    difference: str | None = None


@dataclass(frozen=True)
class LayerError:
    """A layer's attention outputs against float64: largest absolute error, and relative L2 error over all rows."""

    layer: int
    max_abs: float
    relative_l2: float


@dataclass
class ContextResult:
    """One context. refused: why there is no room for it."""

    context: int
    dtype: str
    layouts: list[LayoutResult] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)
    fill_s: float = 0.0
    reference_s: float = 0.0
    refused: str | None = None

    @property
    def relative_l2(self) -> float:
        """The worst layer's."""
        return max((one.relative_l2 for one in self.layers), default=0.0)

    @property
    def max_abs(self) -> float:
        """The worst layer's."""
        return max((one.max_abs for one in self.layers), default=0.0)

    @property
    def status(self) -> str:
        """ "pass", "FAIL" or "refused"."""
        if self.refused:
            return "refused"
        equal = all(one.status in ("baseline", "equal") for one in self.layouts)
        return "pass" if equal and self.relative_l2 <= BOUND else "FAIL"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "status": self.status, "bound": BOUND, "steps": STEPS}


def validate(
    host: Host,
    device: Device,
    contexts: Sequence[int],
    layouts: Sequence[Layout],
    *,
    dtype: str | None = None,
    page_size: int = PAGE_SIZE,
    seed: int = 0,
    progress: Progress | None = None,
    on_context: Callable[[ContextResult], None] | None = None,
) -> list[ContextResult]:
    """Decode the last STEPS positions of each context with every layout; compare bits, and outputs with float64.

    dtype: of the cache, None for the model's; seed: of keys, values and token ids. A context is filled once; every
    layout decodes a fork. ArgumentError: contexts below STEPS or beyond the model's positions.
    """
    for context in contexts:
        check_int("contexts", context, STEPS)
        host.check_positions(context, "contexts")
    single = Layout.parse("1")
    every = list(dict.fromkeys([single, *layouts]))
    found = []
    for context in contexts:
        run = _Context(host, device, context, dtype, page_size, seed, progress)
        run.validate(every)
        found.append(run.result)
        if on_context:
            on_context(run.result)
    return found


class _Context:
    """One context of a validation."""

    def __init__(
        self,
        host: Host,
        device: Device,
        context: int,
        dtype: str | None,
        page_size: int,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.host, self.device, self.context, self.seed, self.progress = host, device, context, seed, progress
        self.page_size = page_size
        self.hf = integration()
        self.cache = self.hf.ZincCache(host.model.config, context, device=device, dtype=dtype, page_size=page_size)
        self.dtype = dtype or {"torch.float32": "f32", "torch.float16": "f16"}.get(str(host.dtype), "bf16")
        self.layers = [layer for layer in self.cache.layers if isinstance(layer, self.hf.ZincLayer)]
        self.result = ContextResult(context, self.dtype)
        self.done = self.total = 0

    def _tell(self, what: str, count: int = 1) -> None:
        if self.progress:
            self.progress(f"{self.context:,} keys: {what}", self.done, self.total)
        self.done += count

    def validate(self, layouts: Sequence[Layout]) -> None:
        """Fill, decode with every layout, and compare."""
        fixed, result = self.context - STEPS, self.result
        blocks = -(-fixed // BLOCK)
        keys = -(-self.context // REFERENCE_BLOCK)
        self.total = len(self.layers) * (blocks + keys) + len(layouts) * STEPS
        try:
            with self.cache:
                self._check_room()
                self.cache.allocate(self.host.dtype)
                whole = fixed // self.page_size * self.page_size  # forks share full pages, and write the rest anew
                begin = perf_counter()
                self._fill(self.cache, 0, whole)
                result.fill_s = perf_counter() - begin
                base: Watch | None = None
                for layout in layouts:
                    watch, seconds = self._decode(layout, whole)
                    part = first_difference(watch.steps, base.steps) if base else None
                    word = "baseline" if base is None else "equal"
                    if part:
                        word = "DIFFERENT" if part.ours else "host differs"
                    base = base or watch
                    step_ms, attention_ms = (1e3 * float(np.median(x)) for x in (seconds, watch.steps_s))
                    text, splits = part.text if part else None, self._splits(layout)
                    result.layouts.append(LayoutResult(layout.label, splits, word, step_ms, attention_ms, text))
            assert base is not None
            begin = perf_counter()
            result.layers += [self._error(layer, base) for layer in self.layers]
            result.reference_s = perf_counter() - begin
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            result.refused = str(error) or "no room in host memory"

    def _check_room(self) -> None:
        """Refuse what the host cannot hold where the device's memory is the host's."""
        if self.device.info.kind in ("cpu", "integrated"):
            pages = -(-self.context // self.page_size)
            per_token = sum(layer.shape.kv_bytes_per_token(self.dtype) for layer in self.layers)
            _check_memory(pages * self.page_size * per_token, f"keys and values of {self.context:,} tokens")

    def _splits(self, layout: Layout) -> int:
        info = self.device.info
        shape: AttnShape = self.layers[0].shape
        return layout.plan(self.context, shape, info.compute_units, self.dtype, info.kind).num_splits

    # --- values -------------------------------------------------------------------------------------------

    def _values(self, layer: Any, begin: int, end: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Seeded k and v of tokens [begin, end) in pieces, as a cache of the dtype takes them."""
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            rng = np.random.default_rng([self.seed, layer.index, block])
            shape = (2, BLOCK, layer.shape.kv_heads, layer.shape.head_dim)
            made = rng.standard_normal(shape, np.float32)
            part = slice(max(begin - block * BLOCK, 0), min(end - block * BLOCK, BLOCK))
            k, v = (narrow(x[part], self.dtype) for x in made)
            yield k, v

    def _fill(self, cache: Any, begin: int, end: int) -> None:
        """Append tokens [begin, end) to the attention layers."""
        while begin < end:
            until = min(begin // BLOCK * BLOCK + BLOCK, end)
            if cache is self.cache:
                self._tell("filling the cache", len(self.layers))
            cache.append(lambda layer, a=begin, b=until: next(self._values(layer, a, b)), self.host.dtype)
            begin = until

    def _decode(self, layout: Layout, whole: int) -> tuple[Watch, list[float]]:
        """The last STEPS positions on a fork, and the seconds of each forward."""
        import torch

        vocab = self.host.config.vocab_size
        ids = np.random.default_rng([self.seed, STEPS]).integers(0, vocab, STEPS).tolist()
        self.cache.set_layout(layout.num_splits, layout.split_size)
        twin, watch, seconds = self.cache.fork(), Watch(keep=True), list[float]()
        try:
            self._fill(twin, whole, self.context - STEPS)
            watch.attach(twin)
            with torch.no_grad(), _quiet():
                for one in ids:
                    self._tell(f"layout {layout.label}")
                    begin, aside = perf_counter(), watch.aside
                    logits = self.host.logits(torch.tensor([[one]]), twin)
                    seconds.append(perf_counter() - begin - (watch.aside - aside))
                    watch.end_step(logits)
        finally:
            twin.reset()
        return watch, seconds

    # --- float64 ------------------------------------------------------------------------------------------

    def _stored(self, layer: Any, calls: Sequence[Call]) -> Iterator[tuple[F32, F32]]:
        """The values that the layer's cache holds, in pieces: the seeded ones, then the decoded tokens'."""
        for k, v in self._values(layer, 0, self.context - STEPS):
            for at in range(0, len(k), REFERENCE_BLOCK):
                part = slice(at, at + REFERENCE_BLOCK)
                self._tell("float64 reference")
                yield rows.stored(k[part], v[part], self.dtype)
        new = (np.stack([getattr(call, name).float().numpy()[:, 0] for call in calls]) for name in "kv")
        k, v = (narrow(x, self.dtype) for x in new)
        yield rows.stored(k, v, self.dtype)

    def _error(self, layer: Any, base: Watch) -> LayerError:
        """Of all that attends the layer's keys and values: in some models modules share them."""
        calls = [[call for call in step.calls if call.layer == layer.index] for step in base.steps[:STEPS]]
        limits = np.arange(self.context - STEPS, self.context) + 1
        largest = squares = norm = 0.0
        for mine in zip(*calls, strict=True):
            q, got = (np.concatenate([getattr(call, name) for call in mine]) for name in ("q", "out"))
            options = mine[0].options
            arguments = {"window": options.window, "softcap": options.softcap, "sinks": options.sinks}
            stored = self._stored(layer, [one[0] for one in calls])
            want = blockwise_attention(q, stored, limits, options.scale, **arguments)
            largest = max(largest, float(np.abs(got - want).max()))
            squares, norm = squares + float(np.sum((got - want) ** 2)), norm + float(np.sum(want**2))
        return LayerError(layer.index, largest, math.sqrt(squares / norm) if norm else float(largest > 0))


def narrow(x: F32, dtype: str) -> NDArray[Any]:
    """float32 values rounded to nearest even to what a cache of ``dtype`` takes: float16 for f16, otherwise float32."""
    if dtype == "f16":
        return x.astype(np.float16)
    if dtype == "bf16":
        words = np.ascontiguousarray(x).view(np.uint32)
        return ((words + np.uint32(0x7FFF) + (words >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return x


def blockwise_attention(
    q: F32,
    blocks: Iterator[tuple[F32, F32]],
    limits: NDArray[Any],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: F32 | None = None,
) -> F64:
    """Softmax attention in float64 over keys and values that come in blocks: (n, q_heads, head_dim).

    q: (n, q_heads, head_dim); blocks: k and v (tokens, kv_heads, head_dim), consecutive from position 0; limits: (n,)
    row i sees keys below limits[i], at least one, with ``window`` only the last ``window`` of these.
    """
    n, q_heads, head_dim = q.shape
    top = np.full((n, q_heads), _MASKED) if sinks is None else np.tile(sinks.astype(np.float64), (n, 1))
    total = np.zeros((n, q_heads)) if sinks is None else np.ones((n, q_heads))
    sums = np.zeros(q.shape)
    firsts = np.zeros_like(limits) if window is None else np.maximum(limits - window, 0)
    begin = 0
    for k, v in blocks:
        tokens, kv_heads, _ = k.shape
        position = begin + np.arange(tokens)
        seen = (position < limits[:, None]) & (position >= firsts[:, None])  # (n, tokens)
        begin += tokens
        if not seen.any():
            continue
        group = q_heads // kv_heads
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            s = q[:, mine].astype(np.float64).reshape(n * group, head_dim) @ k[:, head].astype(np.float64).T * scale
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            s = np.where(seen[:, None], s.reshape(n, group, tokens), _MASKED)
            higher = np.maximum(top[:, mine], s.max(axis=2))
            kept = np.exp(top[:, mine] - higher)
            p = np.exp(s - higher[..., None]) * seen[:, None]
            total[:, mine] = total[:, mine] * kept + p.sum(axis=2)
            added = p.reshape(n * group, tokens) @ v[:, head].astype(np.float64)
            sums[:, mine] = sums[:, mine] * kept[..., None] + added.reshape(n, group, head_dim)
            top[:, mine] = higher
    return sums / total[..., None]
