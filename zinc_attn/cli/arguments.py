"""Shared parts of the commands' arguments: options, the form of a help, exit statuses, device and model."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from ..dtypes import storage_dtype
from ..errors import ArgumentError, ZincAttnError
from ..planning.arithmetic import ARITHMETICS
from ..runtime.cpu import NAME as CPU
from ..runtime.device import RUNTIMES, Device, default_runtime, find_device
from ..shapes import AttnShape
from ..storage import STORAGE
from ..tools.models import PRESETS, ModelPreset, find_model
from .terminal import EX_IOERR, NO_READER, say

Subparsers = Any  # argparse's _SubParsersAction, which it does not export

DEFAULT_CONTEXTS: Final = "1k,8k,32k,128k"
DEFAULT_COMPUTE_UNITS: Final = 64  # a Radeon AI PRO R9700
UNMET: Final = 3  # a gate of compilers does not hold
FAULT: Final = 70  # EX_SOFTWARE of sysexits.h
STATUSES: Final = {
    0: "fine",
    1: "a wrong bit, or with matrix units an error beyond its bound; of proof any step that is not ok",
    2: "refused: wrong arguments, no device, no room, a lost device or rank; stderr says why",
    UNMET: "a gate of compilers is not met",
    FAULT: "a fault of this program; please report it",
    EX_IOERR: "stdout cannot be written",
    130: "interrupted",
    NO_READER: "nobody reads stdout any more",
}


def _dtype(text: str) -> str:
    try:
        return storage_dtype(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# metavar, type or choices of one value, and the help
SHARED: Final[Mapping[str, tuple[str, Callable[[str], Any] | tuple[str, ...], str]]] = {
    "--shape": ("Q/KV/D", str, "q_heads/kv_heads/head_dim, for example 16/2/256"),
    "--contexts": ("N", str, "numbers of keys, k = 1024"),
    "--splits": ("S", str, "split layout: auto (the split rule), a number of splits, or size:KEYS"),
    "--rows": ("N", int, "query rows of a sequence in a call"),
    "--dtype": ("T", _dtype, f"storage type of K and V, or K's/V's, for example q8_0/q4_0: {', '.join(STORAGE)}"),
    "--page-size": ("N", int, "tokens per page of the cache"),
    "--device": ("D", str, "index or piece of the name, see 'zinc-attn devices'"),
    "--runtime": ("R", RUNTIMES, "dispatcher of a Vulkan device: kompute, vulkan; or cpu, the device cpu's"),
    "--cu": ("N", int, "compute units of the device"),
    "--out": ("DIR", str, "folder of the files, which are written over"),
}


class CommandParser(argparse.ArgumentParser):
    """A parser whose refusals are ArgumentErrors. Its methods declare the options that commands share.

    group: options that exclude each other, to which the declared one belongs.
    """

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}; see '{self.prog} --help'")

    def format_help(self) -> str:
        statuses = (f"  {status:<5}{text}\n" for status, text in STATUSES.items())
        return f"{super().format_help()}\nexit status:\n{''.join(statuses)}"

    def share(
        self,
        name: str,
        default: Any = None,
        said: str = "",
        *,
        several: bool = False,
        text: str = "",
        group: Any = None,
    ) -> None:
        """An option of SHARED. said: the default in words; several: a list is taken; text: in place of its help."""
        metavar, kind, help_text = SHARED[name]
        said = said or ("" if default is None else str(default))
        text = (text or help_text) + (f" (default: {said})" if said else "")
        single: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        taken = {"type": str} if several else single
        (group or self).add_argument(name, default=default, metavar=metavar + ",…" * several, help=text, **taken)

    def flag(self, name: str, text: str) -> None:
        self.add_argument(name, action="store_true", help=text)

    def path(self, name: str, text: str) -> None:
        self.add_argument(name, metavar="FILE", type=Path, help=text)

    def number(self, name: str, text: str, default: int | None = None) -> None:
        """An option of an int; the default is said where there is one."""
        said = "" if default is None else f" (default: {default})"
        self.add_argument(name, type=int, default=default, metavar="N", help=text + said)

    def device(self) -> None:
        """--device and --runtime, with the environment's defaults."""
        self.share("--device", said="$ZINC_ATTN_DEVICE, else the best: discrete, integrated, CPU")
        self.share("--runtime", said="$ZINC_ATTN_RUNTIME, else kompute where kp is built, or vulkan; cpu of cpu")

    def arithmetic(self, names: tuple[str, ...] = ARITHMETICS) -> None:
        """--arithmetic of attention, one of ``names``."""
        text = "of attention, with the same bits on every device: canonical; fused, with one rounding for a product "
        text += "and its sum"
        if "integer" in names:
            text += "; integer, with sums of integers, for K and V in q8_0, q5_0, q4_0 or iq4_nl"
        if "matrix" in names:
            text += ". matrix multiplies float16 numbers and adds in float32, on the device's matrix units, in its bits"
        text += "; matrix-prefill does so where a call has many rows" if "matrix-prefill" in names else ""
        self.add_argument("--arithmetic", choices=names, default=names[0], help=f"{text} (default: %(default)s)")

    def measuring(self) -> None:
        """The options of commands that verify and time calls, without their device's."""
        self.share("--contexts", DEFAULT_CONTEXTS, several=True)
        self.share("--splits", "auto,1", several=True)
        self.arithmetic()
        self.number("--repeats", "timed runs per call (default: 5 to 50 within 3 s)")
        self.output()

    def output(self) -> None:
        """--out, --no-picture and --json of a command that leaves rows."""
        self.share("--out", said="./COMMAND-DEVICE")
        self.add_argument("--no-picture", dest="picture", action="store_false", help="leave no PNG among the files")
        self.flag("--json", "JSON lines on stdout, as rows are ready, in place of text")
        self.oracle()

    def oracle(self) -> None:
        text = "whose bits judge: numpy, or cpu, native code of the processor, which drawn parts of the run show equal "
        text += "to NumPy first (default: cpu where it can be had and does not run the calls; numpy of --graph)"
        self.add_argument("--oracle", choices=("cpu", "numpy"), help=text)

    def model(self, *, layers: bool = False, shapes: str | None = None) -> None:
        """--model or --shape, and with ``layers`` --layers. shapes: those of --shape, which then takes a list."""
        group = self.add_mutually_exclusive_group()
        models = f"a Hugging Face config.json by path, or one of {', '.join(PRESETS)}"
        group.add_argument("--model", metavar="M", help=models)
        self.share("--shape", shapes, group=group, several=shapes is not None)
        if layers:
            self.number("--layers", "layers with attention (default: the model's; 1 for --shape)")


def add_command(
    subparsers: Subparsers, run: Callable[[argparse.Namespace], int], alias: str | None = None, **values: object
) -> CommandParser:
    """A command that is called like the module of ``run``. Its help is help/NAME.txt.

    The first line of the file stands in the list of commands. values: of the names in braces.
    """
    name = run.__module__.rpartition(".")[2]
    text = (Path(__file__).parent / "help" / f"{name}.txt").read_text(encoding="utf-8").format(**values)
    description, _, example = text.partition("\n\nexample:\n")
    summary, _, rest = description.partition("\n\n")
    parser: CommandParser = subparsers.add_parser(
        name,
        aliases=[alias] if alias else [],
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{rest}",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=name, parser=parser, run=run)
    return parser


def installed_runtimes() -> str:
    """The runtimes that are installed, as --runtime takes them."""
    return ",".join(RUNTIMES[default_runtime() == "vulkan" :])


def open_devices(stack: ExitStack, names: list[Any], runtimes: str | None) -> list[Device]:
    """Every device of ``names`` on each of its runtimes among ``runtimes``, the text of --runtime; None: its default.

    ``stack`` closes them. ArgumentError: a device has none of ``runtimes``.
    """
    chosen = [None] if runtimes is None else list(dict.fromkeys(name.strip() for name in runtimes.split(",")))
    devices = []
    for name in names:
        native = find_device(name, chosen[0] if len(chosen) == 1 else None).native
        fitting = [runtime for runtime in chosen if runtime is None or native == (runtime == CPU)]
        for runtime in fitting or chosen[:1]:  # the latter is refused
            devices.append(stack.enter_context(Device.open(name, runtime=runtime)))
    return devices


def open_oracle(stack: ExitStack, name: str | None, devices: Sequence[Device]) -> Device | None:
    """The processor, whose native code judges the run on ``devices``, and a line on stderr that says who judges; None
    for NumPy. name: of --oracle. ArgumentError: the processor would judge itself. ``stack`` closes it."""
    judged, device, why = any(opened.info.native for opened in devices), None, ""
    if name == CPU and judged:
        raise ArgumentError("oracle: got cpu, which would judge itself, expected numpy, or another --device")
    if name != "numpy" and not judged:
        try:
            device = stack.enter_context(Device.open(CPU))
        except ZincAttnError as error:
            if name == CPU:
                raise
            why = f" ({error})"
    say(f"oracle: {'native code, whose bits drawn parts of this run compare with NumPy' if device else 'NumPy'}{why}")
    return device


def chosen_model(args: argparse.Namespace) -> ModelPreset:
    """The model of --model or --shape, with the layers of --layers; a bare shape is a model of one layer."""
    if args.model:
        model = find_model(args.model)
    elif args.shape:
        model = shape_model(AttnShape.parse(args.shape))
    else:
        raise ArgumentError("model: got none, expected --model or --shape, for example --model qwen3.6-35b-a3b")
    layers = getattr(args, "layers", None)
    return model if layers is None else replace(model, attention_layers=layers, windowed_layers=0)


def shape_model(shape: AttnShape) -> ModelPreset:
    """A bare shape as a model of one layer."""
    return ModelPreset(str(shape), shape, 1)


def parse_shapes(text: str) -> list[AttnShape]:
    """``16/2/256,32/4/128`` to shapes."""
    return [AttnShape.parse(word.strip()) for word in text.split(",")]
