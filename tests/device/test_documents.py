"""README and docs/ against the program: every Python block runs, every command line parses, every figure is printed.

A page's Python blocks run in order, in one namespace, as a reader pastes them. Comments that a reader does not see make
files or check what was found, and no name of theirs reaches a block: ``<!-- run first:`` and code. Where a page runs
only with certain modules: ``<!-- needs MODULES -->``.
"""

import argparse
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from math import log2
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from c_host import digest
from commands import run, shown

import zinc_attn as za
from zinc_attn import errors, limits
from zinc_attn.cache.device_encoding import LEAST_ROWS
from zinc_attn.canonical import constants
from zinc_attn.cli import app as cli
from zinc_attn.cli.arguments import DEFAULT_CONTEXTS, STATUSES, chosen_model
from zinc_attn.graph import constants as of_graph
from zinc_attn.graph import rope
from zinc_attn.kernels import declarations
from zinc_attn.storage import IQ4_NL, STORAGE
from zinc_attn.tools import export
from zinc_attn.tools.check import Case, record
from zinc_attn.tools.cost import CARDS, predict_call
from zinc_attn.tools.export import describe
from zinc_attn.tools.graph.check import CASES as MODELS
from zinc_attn.tools.graph.check import committed, name_of
from zinc_attn.tools.harness.inputs import parse_contexts
from zinc_attn.tools.harness.split_spec import SplitSpec

NATIVE = True
ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXTS = {**PAGES, **{name: (ROOT / name).read_text() for name in ("CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml")}}
BLOCK = re.compile(r"^```python\n(?P<shown>.*?)^```$|^<!-- run first:\n(?P<hidden>.*?)^-->$", flags=re.M | re.S)

# --- Python --------------------------------------------------------------------------------------------------


def of_its_device(page: str, text: str) -> Any:
    """README, and a page whose blocks need Kompute, have a Vulkan device."""
    has_driver = page == "README.md" or "needs kp" in text
    return pytest.param(page, marks=[pytest.mark.of_drivers] * has_driver, id=page)


@pytest.mark.parametrize("page", [of_its_device(*page) for page in PAGES.items() if "```python" in page[1]])
def test_the_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGES[page]
    for module in ", ".join(re.findall(r"^<!-- needs (.*) -->$", text, flags=re.M)).split(", "):
        if module:
            pytest.importorskip(module, reason=f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": page}
    for block in BLOCK.finditer(text):
        code = block["shown"] or block["hidden"]
        assert not re.search(r"^ .*\n(?=\w)", block["shown"] or "", flags=re.M), "a REPL wants a blank line there"
        lines = "\n" * text.count("\n", 0, block.start())  # so that a traceback has the page's line numbers
        exec(compile(f"{lines}\n{code}", page, "exec"), namespace if block["shown"] else dict(namespace))
    for value in namespace.values():
        if isinstance(value, za.Device):
            value.close()


def test_every_block_of_python_is_seen() -> None:
    """A fence with another word, or none, that holds Python would not run."""
    for page, text in PAGES.items():
        assert {language for language, _ in FENCE.findall(text)} <= {"", "python", "c"}, page
        assert not [code for code in fences(text) if re.search(r"^(import|from|with) |^\w+ = ", code, flags=re.M)], page


# --- command lines -------------------------------------------------------------------------------------------

COMMAND = re.compile(r"(?:zinc-attn|scripts/run) ([a-z][\w-]*(?: [^`|\n]*)?)")
PLACEHOLDERS = {"SHAPE": "16/2/256", "TYPE": "f16", "LIST": "f16", "N": "1", "$(seq -s, 1 200)": "1"}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.M | re.S)


def fences(text: str) -> list[str]:
    """The lines of fences without a language; a line that goes on with a backslash is one line."""
    return [code.replace("\\\n", " ") for language, code in FENCE.findall(text) if not language]


def spans(text: str) -> list[str]:
    """Code within sentences and tables, in one line each."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def calls(code: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of this program in some code, and their arguments."""
    for found in COMMAND.finditer(code):
        line = re.split(r"\s#|\s&&|\s[:>]\s", found[1])[0]
        for name, value in PLACEHOLDERS.items():
            line = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", value, line)
        name, *arguments = shlex.split(line)
        yield name, arguments


def options(parser: argparse.ArgumentParser) -> set[str]:
    """The options that the parser's help shows."""
    return {name for a in parser._actions if a.help != argparse.SUPPRESS for name in a.option_strings}


@pytest.mark.parametrize("page", TEXTS)
def test_the_command_lines_are_the_programs(page: str) -> None:
    """Lines in fences parse. Lines in sentences, which may leave arguments out, have options that exist."""
    whole, parts = (
        [call for code in found for call in calls(code)] for found in (fences(TEXTS[page]), spans(TEXTS[page]))
    )
    for name, arguments in whole + parts:
        assert name in commands(), f"{page}: {name}"
        assert {x for x in arguments if x.startswith("--")} <= options(commands()[name]), f"{page}: {name} {arguments}"
    for name, arguments in whole:
        commands()[name].parse_args(arguments)


SCRIPTS = "test", "build_kp.sh", "lib/llama_sweep.py"


def test_an_option_that_a_page_names_alone_is_one_of_a_command_or_script() -> None:
    of_llama = {"--swa-full", "--n-cpu-moe", "--cache-ram", "--no-kv-offload", "--context-shift", "--chunks"}
    known = {"--version", "--no-deps"}.union(of_llama, *map(options, commands().values()))
    for program in (*ROOT.glob("examples/**/*.py"), *(ROOT / "scripts" / name for name in SCRIPTS)):
        known |= set(re.findall(r"--[a-z][\w-]*", program.read_text()))
    for page, text in TEXTS.items():
        for span in spans(text) if page.endswith(".md") and page != "CHANGELOG.md" else ():  # which names what went
            named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span))
            assert named <= known, f"{page}: {span}"


# --- the picture ---------------------------------------------------------------------------------------------


@pytest.mark.of_drivers
def test_the_picture_says_what_its_command_draws(tmp_path: Path, capsys: Any) -> None:
    """The first command of README, at two short contexts; what is modeled in the picture is today's model's."""
    pytest.importorskip("matplotlib", reason="pip install 'zinc-attn[cli]'")
    ((name, arguments), *_) = [call for code in fences(PAGES["README.md"]) for call in calls(code)]
    assert run(name, *arguments, "--contexts 64,128 --repeats 1 --runtime vulkan --out", tmp_path) == 0
    capsys.readouterr()
    drawn, kept = (shown(path.read_bytes()) for path in (tmp_path / "sweep.png", ROOT / "docs/sweep.png"))
    assert kept["title"] == drawn["title"] and kept["notes"].splitlines()[0] == drawn["notes"].splitlines()[0]
    lines = [{line.split(", ")[1]: points for line, points in one["lines"].items()} for one in (drawn, kept)]
    assert list(lines[1]) == list(lines[0])  # in this order, of whatever device
    contexts = parse_contexts(DEFAULT_CONTEXTS)
    model = chosen_model(commands()[name].parse_args(arguments))
    for line, points in lines[1].items():
        assert [context for context, _ in points] == contexts and all(speed > 0 for _, speed in points), line
        if line.startswith("modeled"):
            layout = SplitSpec.parse("auto" if "rule" in line else "1")
            plans = [layout.plan(n, model.shape, CARDS["r9700"].compute_units) for n in contexts]
            times = [predict_call(plan, CARDS["r9700"]).total_us * model.attention_layers for plan in plans]
            assert [speed for _, speed in points] == pytest.approx([1e6 / us for us in times], rel=1e-5), line


# --- places --------------------------------------------------------------------------------------------------


FILE = re.compile(r"[\w/.-]+\.(py|sh|comp|glsl|c|cpp|h)")
TOPS = "zinc_attn", "shaders", "native", "examples", "tests", "scripts"


def files(top: str) -> list[Path]:
    """Of a folder, those with text."""
    kinds = ".py", ".sh", ".comp", ".glsl", ".c", ".cpp", ".h", ".txt", ".ini"
    return [path for path in (ROOT / top).rglob("*") if path.suffix in kinds]


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [name for name in TEXTS if name.endswith(".md")])
def test_links_and_files_are_there(page: str) -> None:
    """A file may be named by the end of its path."""
    folder = ROOT / "docs" if (ROOT / "docs" / page).exists() else ROOT
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", TEXTS[page]):
        path = (folder / target) if target else folder / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path.read_text()), f"{page}: {target}#{anchor}"
    paths = [f"/{path}" for top in TOPS for path in files(top)]
    for span in spans(TEXTS[page]) if page != "CHANGELOG.md" else ():
        if FILE.fullmatch(span) and span != "first.c":
            assert any(path.endswith(f"/{span}") for path in paths), f"{page}: {span}"


def test_names_are_there() -> None:
    """Public names behind ``za.``, and every name with an underscore, a point or brackets: it occurs in the sources."""
    sources = "".join(path.read_text() for top in TOPS for path in files(top))
    known = set(re.findall(r"\w+", sources + TEXTS["pyproject.toml"]))
    for page, text in PAGES.items():
        for span in spans(text):
            for name in re.findall(r"\bza\.([A-Za-z_]+(?:\.[a-z_]+)?)", span):
                assert attrgetter(name)(za) is not None, f"{page}: za.{name}"
            if re.fullmatch(r"(?!v_)\w+([._]\w+)+(\(.*\))?|[A-Z]\w+", span) and not FILE.fullmatch(span):  # v_: AMD's
                assert set(re.split(r"\W+", span.split("(")[0])) <= known, f"{page}: {span}"


# --- tables --------------------------------------------------------------------------------------------------


def column(page: str, heading: str, index: int = 0) -> list[str]:
    """A column of the first table whose first heading is ``heading``: all code in its cells, or else their text."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]*\n((?:\|.*\n)*)", PAGES[page], flags=re.M)
    assert table is not None
    cells = [row.split(" | ")[index].strip("| ") for row in table[1].splitlines()]
    return [name for cell in cells for name in (re.findall(r"`([^`]+)`", cell) or [cell])]


def test_tables_name_what_there_is() -> None:
    """The commands, exit statuses, storage types, errors and keys of the manifest: all of them, and no other."""
    names = {parser.prog.split()[-1] for parser in commands().values()}  # without their other names
    assert {name.split()[0] for name in column("cli.md", "command")} == names
    rows = zip(column("cli.md", "status"), column("cli.md", "status", 1), strict=True)
    assert {int(status): text for status, text in rows} == STATUSES
    assert sorted(column("storage.md", "type")) == sorted(STORAGE)
    assert {*column("embedding.md", "key"), "format", "version", "package"} == set(export.manifest([]))
    kinds = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, za.ZincAttnError)}
    named = set(re.findall(r"`(\w+Error)`", PAGES["files-and-failures.md"]))
    assert kinds <= named | {"ZincAttnError"}
    modules = re.search(r"SPIR-V modules come from `shaders/`: (.*?)\. Spec", PAGES["architecture.md"], flags=re.S)
    assert modules is not None
    assert set(re.findall(r"`(\w+)`", modules[1])) == {decl.file.split(".")[0] for decl in declarations.MODULES}


# --- figures -------------------------------------------------------------------------------------------------

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def counted(name: str) -> ModuleType:
    """A file of tests/device, for what it counts."""
    spec = importlib.util.spec_from_file_location(f"counted_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


def asked_for(what: str) -> str:
    """The least version that pyproject.toml asks for."""
    result = re.search(rf'{what}(?: = ")?>=([\d.]+)"', TEXTS["pyproject.toml"])
    assert result is not None
    return result[1]


def run_of(cases: list[Case]) -> str:
    """The digest of a run, by the committed record."""
    return record.run_digest({str(case): record.committed_digests()[str(case)] for case in cases})


# (page, "" for all; a pattern with a group for the figure; what the program says)
FIGURES: tuple[tuple[str, str, Callable[[], Any]], ...] = (
    ("CHANGELOG.md", r"\A(?:.*\n)*?## (\d\S*), 20\d\d-\d\d-\d\d\n", lambda: za.__version__),
    ("pyproject.toml", r'^dynamic = \["(\w+)"\]', lambda: "version"),
    ("pyproject.toml", r'^\[tool\.hatch\.version\]\npath = "(\S+)"', lambda: "zinc_attn/__init__.py"),
    ("README.md", r"Python (3\.\d+) or later", lambda: asked_for("requires-python")),
    ("transformers.md", r"transformers (\d\.\d+) or later", lambda: asked_for('"transformers')),
    ("embedding.md", r"`version` is (\d+)", lambda: describe.VERSION),
    ("embedding.md", r"`([0-9a-f]{64})`", lambda: digest.digest("16/2/256", 150, 64, 4)),
    ("architecture.md", r"(\w+) SPIR-V modules come", lambda: NUMBERS[len(declarations.MODULES)]),
    ("", r"[Hh]ead(?:s of any size up| sizes 1) to (\d+)", lambda: limits.MAX_HEAD_DIM),
    ("kernels.md", r"each is 1 to (\d+)", lambda: limits.MAX_HEAD_DIM),
    ("README.md", r"contexts up to 2\*\*(\d+) keys", lambda: limits.MAX_CONTEXT.bit_length() - 1),
    ("architecture.md", r"\*\*leaf\*\*: (\d+) consecutive keys", lambda: constants.KEYS_PER_LEAF),
    ("architecture.md", r"\*\*node\*\*: (\w+) leaves", lambda: NUMBERS[constants.LEAVES_PER_NODE]),
    ("architecture.md", r"\*\*node\*\*: .* (\d+) keys", lambda: constants.KEYS_PER_NODE),
    (
        "architecture.md",
        r"\*\*page\*\*: .* (\d+) tokens",
        lambda: signature(za.KVCache).parameters["page_size"].default,
    ),
    ("", r"whole nodes of (\d+) keys", lambda: constants.KEYS_PER_NODE),
    ("determinism.md", r"\|x\| < 2\^-(\d+) becomes 0", lambda: -round(log2(constants.MIN_INPUT))),
    ("determinism.md", r"\|x\| > 2\^(\d+), a NaN", lambda: round(log2(constants.MAX_INPUT))),
    ("determinism.md", r"(?:- m <|0 below 2\^) ?(-\d+)", lambda: round(constants.CUTOFF)),
    ("determinism.md", r"magnitudes below 2\^(-\d+) become", lambda: round(log2(constants.FLUSH))),
    ("determinism.md", r"\) log2 e is the float64 (\S+)", constants.LOG2E.hex),
    ("determinism.md", r"a = min\(\|x\|, (\d+)\)", lambda: round(constants.TANH_MAX)),
    ("graph.md", r"a = min\(\|x\|, (\d+)\)", lambda: round(of_graph.ERF_MOST)),
    ("graph.md", r"a = max\(x, (-\d+)\)", lambda: round(of_graph.EXP_LEAST)),
    ("graph.md", r"x where x > (\d+)", lambda: round(of_graph.SOFTPLUS_LINEAR)),
    ("graph.md", r"where \|x\| < (0\.\d+): those of z = x", lambda: of_graph.TURN_SMALL),
    ("graph.md", r"of x below (-\d+) as of -10", lambda: round(of_graph.GELU_LEAST)),
    ("graph.md", r"become 0, before y .* of decays, below 2\^(-\d+)", lambda: round(log2(of_graph.DECAY_MIN))),
    ("graph.md", r"^IQ4_NL +(.*)$", lambda: " ".join(map(str, IQ4_NL))),
    ("graph.md", r"LN2 = (0\.\d+)", lambda: rope.LN2),
    ("graph.md", r"INVERSE = (0\.\d+)", lambda: rope.INVERSE_TURN),
    ("graph.md", r"where f < (0\.\d+)", lambda: rope.SQRT_HALF),
    ("determinism.md", r"leaf +(\d+) keys from", lambda: constants.KEYS_PER_LEAF),
    ("determinism.md", r"node +(\d+) keys:", lambda: constants.KEYS_PER_NODE),
    ("determinism.md", r"comparisons\nrun (\w+)  llvmpipe", lambda: run_of(Case.quick())),
    ("determinism.md", r"prints run\n`(\w+)` on lavapipe of both", lambda: run_of(Case.quick("fused"))),
    ("determinism.md", r"on Mesa 26.2.6, `(\w{64})`", lambda: run_of(Case.default("fused"))),
    ("determinism.md", r"20 cases, prints run\n`(\w+)`", lambda: run_of(Case.quick("integer"))),
    (
        "determinism.md",
        r"operations  .*\nrun (\w+)  llvmpipe",
        lambda: record.run_digest({name_of(kind): digest for kind, digest in committed().items() if kind in MODELS}),
    ),
    ("determinism.md", r"the digest was `(\w+)` on lavapipe of", lambda: committed()["qwen3.6-35b-a3b"][:16]),
    ("determinism.md", r"`--quick` has (\d+) cases", lambda: len(Case.quick())),
    ("determinism.md", r"oracle's bits +pass, (\d+) comparisons", lambda: len(Case.quick())),
    ("determinism.md", r"a table of (\d+) changes", lambda: len(counted("test_slips").slips("attend"))),
    ("determinism.md", r": ([\d,]+) cases, each compared", lambda: f"{len(counted('test_grid').cases()):,}"),
    ("determinism.md", r"runs (\d+) of them on", lambda: len(counted("test_grid").drawn())),
    ("storage.md", r"quantizes (\d+) rows or more", lambda: LEAST_ROWS // 2 + 1),
)


@pytest.mark.parametrize(("page", "pattern", "said"), FIGURES, ids=[f"{page}:{p}" for page, p, _ in FIGURES])
def test_a_figure_is_the_programs(page: str, pattern: str, said: Callable[[], Any]) -> None:
    """And stands somewhere: a pattern that finds nothing checks nothing."""
    texts = [TEXTS[page]] if page else PAGES.values()
    result = [value for text in texts for value in re.findall(pattern, text, flags=re.M)]
    assert result
    assert {value.lower() for value in result} == {str(said()).lower()}


CONSTANT = re.compile(r"\b([A-Z][A-Z0-9_]+) +(-?0x[\w.+-]+(?:\s+-?0x[\w.+-]+)*)")


def test_the_numbers_of_the_arithmetic_are_the_codes() -> None:
    """Constants of its two pages, hexadecimal words and float32 numbers; with every polynomial, seed and table."""
    known = vars(constants) | vars(of_graph)
    told = dict(found for page in ("determinism.md", "graph.md") for found in CONSTANT.findall(PAGES[page]))
    for name, numbers in told.items():
        values = known[name] if isinstance(known[name], tuple) else (known[name],)
        expected = [x if isinstance(x, int) else float(np.float32(x)) for x in values]
        assert [float.fromhex(x) if "p" in x else int(x, 16) for x in numbers.split()] == expected, name
    assert told.keys() >= {x for x in known if x.endswith(("_POLY", "_SEED", "_TURN", "MXFP4", "_A", "_B", "1_SMALL"))}
