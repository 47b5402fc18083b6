"""Command lines in this process, and how they are refused."""

import io
import json
import shlex
from typing import Any

import pytest

from zinc_attn.cli import app as cli

DRAWING = ("sweep", "bench", "decode", "proof")


def run(*words: Any) -> int:
    """The exit status of a command line; a word with spaces in it stands for several."""
    argv = [part for word in words for part in (shlex.split(word) if isinstance(word, str) else [str(word)])]
    if argv[0] in DRAWING:
        pytest.importorskip("matplotlib", reason="pip install 'zinc-attn[cli]'")
    try:
        return cli.main(argv)
    except SystemExit as ended:  # as argparse ends a program
        return ended.code


def on(device: Any) -> str:
    """The options of a command that name a device."""
    return f"--device {device.info.index} --runtime {device.runtime.name}"


def refusal(capsys: Any, *words: Any) -> str:
    """The one line with which a command line is refused, less its begin; notes of the device may come before it."""
    status = run(*words)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if ": error: " in line]
    assert (status, out, len(lines)) == (2, "", 1) and "Traceback" not in err, (status, out, err)
    return lines[0].removeprefix("zinc-attn: error: ")


def records(capsys: Any, *words: Any) -> list[dict[str, Any]]:
    """What a command line that ends well prints as JSON lines."""
    assert run(*words) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def shown(png: bytes) -> Any:
    """What a picture says it shows: title, notes and lines."""
    from PIL import Image  # which matplotlib needs

    return json.loads(Image.open(io.BytesIO(png)).info["Description"])
