"""Conversations: what a turn keeps of the ones before, interrupted answers, and ``zinc-attn generate --chat``."""

import io
import itertools
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from tiny_models import TEMPLATE, byte_tokenizer, config_file, saved
from zinc_models import hf, torch, transformers

import zinc_attn as za
from zinc_attn.cli import app as cli
from zinc_attn.cli.checkpoint import THREADS, share_cores
from zinc_attn.errors import ArgumentError
from zinc_attn.tools import generate

pytestmark = pytest.mark.usefixtures("one_thread")
TURNS = ("the sea is wide", "a bit never moves", "the sky is blue; ä€")
SETTINGS = generate.Settings(max_new_tokens=9)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint with a chat template."""
    return saved(tmp_path_factory.mktemp("chat") / "m", template=TEMPLATE)


@pytest.fixture(scope="module")
def model(path):
    return generate.load_model(path)


def ignore(piece):
    """A reader of an answer that does nothing with it."""


@pytest.fixture
def talk(model, device):
    with generate.open_conversation(model, byte_tokenizer(TEMPLATE), device, SETTINGS) as opened:
        yield opened


def rendered(*texts):
    """The token ids of a conversation up to the next answer; user and assistant take turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return list(byte_tokenizer(TEMPLATE).apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def fresh(model, device, *texts):
    """What a prefill of the whole conversation gives."""
    return generate.generate_ids(model, device, rendered(*texts), SETTINGS)


@pytest.mark.parametrize("chunk", [None, 5])
def test_turns_are_those_of_a_fresh_prefill(model, device, chunk):
    """And a turn prefills only what the cache lacks."""
    settings = generate.Settings(max_new_tokens=9, prefill_chunk=chunk, page_size=64)
    texts, held = [], []
    with generate.open_conversation(model, byte_tokenizer(TEMPLATE), device, settings) as talk:
        for text in TURNS:
            pieces: list[str] = []
            turn = talk.answer(text, pieces.append)
            prompt, made = rendered(*texts, text), fresh(model, device, *texts, text)
            alike = [a == b for a, b in zip([*held, None], prompt[:-1], strict=False)]
            common = alike.index(False)
            assert (turn.prompt_tokens, turn.kept_tokens) == (len(prompt), common)
            assert (turn.ids, turn.stopped) == (made.ids, made.stopped)
            assert turn.text == "".join(pieces) == byte_tokenizer().decode(turn.ids)
            texts += [text, turn.text]
            held = [*prompt, *turn.ids[:-1]]
    assert common > 20


def test_linear_attention_layers_begin_anew(tmp_path, device):
    """Their state cannot go back to what two turns have in common."""
    model = generate.build_model(config_file(tmp_path / "c.json", "qwen3_5_moe_text"), seed=7)
    with generate.open_conversation(model, byte_tokenizer(TEMPLATE), device, SETTINGS) as talk:
        first, second = talk.answer(TURNS[0], ignore), talk.answer(TURNS[1], ignore)
    assert second.kept_tokens in (0, first.prompt_tokens + len(first.ids) - 1)
    assert second.ids == fresh(model, device, TURNS[0], first.text, TURNS[1]).ids


def interrupt_at(monkeypatch, at):
    """A layer's MLP raises KeyboardInterrupt in its call number ``at``, from 0."""
    layer, calls = transformers.models.llama.modeling_llama.LlamaMLP, itertools.count()
    right = layer.forward

    def forward(module, x):
        if next(calls) == at:
            raise KeyboardInterrupt
        return right(module, x)

    monkeypatch.setattr(layer, "forward", forward)


@pytest.mark.parametrize(("at", "new"), [(0, 0), (1, 0), (2, 1), (5, 2), (16, 8)])
def test_an_interrupted_answer(at, new, talk, model, device, monkeypatch):
    """In either layer, in the prefill and in a step: what was shown stays, and the next turn is that of a fresh one."""
    first, pieces = talk.answer(TURNS[0], ignore), []
    with monkeypatch.context() as patch:
        interrupt_at(patch, at)
        cut = talk.answer(TURNS[1], pieces.append)
    assert cut.stopped == "interrupted" and len(cut.ids) == new and cut.text == "".join(pieces)
    last = talk.answer(TURNS[2], ignore)
    made = fresh(model, device, TURNS[0], first.text, *([TURNS[1], cut.text] if new else []), TURNS[2])
    assert last.prompt_tokens == made.prompt_tokens and last.kept_tokens > first.prompt_tokens
    assert last.ids == made.ids


def test_an_interrupt_while_a_word_is_shown(talk, model, device):
    """The token of that word has not entered the cache yet."""
    pieces: list[str] = []

    def show(piece):
        pieces.append(piece)
        if "".join(pieces) == piece != "":  # the first word
            raise KeyboardInterrupt

    cut, last = talk.answer(TURNS[0], show), talk.answer(TURNS[1], ignore)
    assert cut.stopped == "interrupted" and 0 < len(cut.ids) < 9
    assert last.ids == fresh(model, device, TURNS[0], cut.text, TURNS[1]).ids


def test_a_question_that_is_asked_again(talk, model, device, monkeypatch):
    """Its first answer was interrupted behind the prefill, so the cache has all of its tokens."""

    def interrupted(cache):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hf.ZincCache, "prepare", interrupted)
        assert talk.answer(TURNS[0], ignore).ids == []
    again = talk.answer(TURNS[0], ignore)
    assert again.kept_tokens == again.prompt_tokens - 1
    assert again.ids == fresh(model, device, TURNS[0]).ids


@pytest.fixture
def chat(path, monkeypatch):
    """The words of the command, with these lines on stdin."""

    def words(lines, options=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return "generate --chat --runtime vulkan --model", path, options

    return words


def test_lines_are_turns(chat, talk, capsys):
    lines = "\n".join([TURNS[0], "", "   ", *TURNS[1:]])  # the last line has no end
    assert run(*chat(lines, "--max-new-tokens 9")) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(f"{talk.answer(text, ignore).text}\n" for text in TURNS)
    assert run(*chat("")) == 0 and capsys.readouterr().out == ""
    assert shown.err.count("the answer is cut off: see --max-new-tokens and --capacity") == 3 and "> " not in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--capacity 60", "chat: got a conversation of 93 tokens, expected at most capacity = 60; begin a new one"),
        ("--capacity 2", "chat: got a conversation of 22 tokens, expected at most capacity = 2; begin a new one"),
        ("--capacity 1025", "capacity: got 1,025 tokens, expected at most max_position_embeddings = 1,024 of m"),
        ("--json", "json: got --chat, expected --prompt or --prompt-ids"),
    ],
)
def test_refused(arguments, message, chat, capsys):
    status = run(*chat("\n".join(TURNS), f"--max-new-tokens 9 {arguments}"))
    error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert status == 2 and len(error) == 1 and error[0].startswith(f"zinc-attn: error: {message}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "chat: m has no chat template, expected a checkpoint that was tuned for conversations; --prompt "),
        ("{{ raise_exception('roles must alternate') }}", "chat: the chat template of m fails: roles must alternate"),
    ],
)
def test_templates_refused(template, message, model, device):
    with (
        pytest.raises(ArgumentError, match=f"^{message}"),
        generate.open_conversation(model, byte_tokenizer(template), device, SETTINGS) as talk,
    ):
        talk.answer(TURNS[0], ignore)


def test_a_conversation_on_a_terminal(path):
    """Ctrl-C ends an answer, and at the prompt the conversation; torch shares the cores."""
    entry = Path(cli.__file__).parents[2] / "zinc_attn_cli.py"
    command = ["generate", "--chat", "--model", path, "--max-new-tokens", "200", "--runtime", "vulkan"]
    # a background job of a shell ignores SIGINT, and what it starts inherits that
    argv = ["env", "--default-signal=INT", *(f"--unset={name}" for name in THREADS), sys.executable, entry, *command]
    master, slave = os.openpty()
    shown, at = "", 0

    def wait_for(text):
        nonlocal shown, at
        while (found := shown.find(text, at)) < 0:
            assert select.select([master], [], [], 120)[0], shown[-1000:]
            shown += os.read(master, 4096).decode(errors="replace")
        at = found + len(text)

    environment = os.environ | {"PYTHONPATH": str(entry.parent), "TERM": "dumb"}
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    with subprocess.Popen(argv, env=environment, **streams) as process:
        try:
            wait_for("> ")
            os.write(master, b"the sea\n")
            wait_for("the sea\r\n")  # the echo; what comes behind it is the answer
            assert select.select([master], [], [], 120)[0]
            process.send_signal(signal.SIGINT)
            wait_for("interrupted: what was shown stays in the conversation")
            os.write(master, b"the sky\n")
            wait_for("the answer is cut off")
            wait_for("> ")
            process.send_signal(signal.SIGINT)
            while not select.select([master], [], [], 2)[0]:  # it came between the prompt and the wait for a line
                process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(master)
            os.close(slave)
    assert "Traceback" not in shown
    with za.Device.open(runtime="vulkan") as device:
        shared = device.info.kind == "cpu" and len(os.sched_getaffinity(0)) > 1
    assert ("torch uses " in shown) == shared


@pytest.mark.parametrize(
    ("cores", "default", "variable", "threads"),
    [(2, 2, "", 1), (16, 8, "", 8), (16, 16, "", 8), (1, 1, "", 1), *((2, 2, name, 2) for name in THREADS)],
)
def test_torch_leaves_cores_to_the_device(cores, default, variable, threads, monkeypatch, capsys):
    """A number of threads that the user has chosen stays."""
    for name in THREADS:
        monkeypatch.setenv(name, "2" if name == variable else "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    torch.set_num_threads(default)
    share_cores()
    assert torch.get_num_threads() == threads
    assert ("torch uses " in capsys.readouterr().err) == (threads < default)


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(ids if isinstance(ids, list) else [ids]).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain text", "ä €𝄞 end", "海は広い", "a\nb", "€", "a \ufffd"])
def test_text_is_streamed_in_whole_characters(text):
    """The last one stands for a text that ends inside a character."""
    pieces: list[str] = []
    put, end = generate.stream_text(Bytes(), pieces.append)
    for byte in text.encode() if text[-1] != "\ufffd" else "a €".encode()[:-1]:
        put(byte)
    assert "\ufffd" not in "".join(pieces) and text.startswith("".join(pieces))
    assert len([piece for piece in pieces if piece]) >= text.count(" ") + text.count("\n")
    end()
    assert "".join(pieces) == text
