"""The picture of measured rows: its lines, their names, and where these stand."""

import pytest
from commands import shown

from zinc_attn.tools.measure import rows_png

matplotlib = pytest.importorskip("matplotlib.figure", reason="pip install 'zinc-attn[cli]'")

CALL = {"device": "a GPU (RADV)", "device_kind": "discrete", "runtime": "vulkan", "shape": "4/2/64", "dtype": "f16"}
CALL |= {"measure": "call", "context": 64, "layout": "auto", "tokens_s": 2.0}
LINES = [  # what differs between the records of one context, and how the picture names their lines
    ([{}], [""]),
    (
        [{"layout": layout} for layout in ("auto", "1", "8", "size:2048")],
        ["split rule", "one split", "8 splits", "splits of 2048 keys"],
    ),
    ([{}, {"runtime": "kompute"}], ["vulkan", "kompute"]),
    ([{}, {"dtype": "q8_0"}], ["f16", "q8_0"]),
    (
        [
            {},
            {"device": "R9700", "runtime": "modeled", "measure": "modeled"},
            {"device": "lavapipe", "device_kind": "cpu"},
        ],
        ["a GPU, measured", "R9700, modeled", "lavapipe on the CPU, measured"],
    ),
    ([{}, {"device": "this CPU", "runtime": "torch float32", "layout": "–"}], ["a GPU · split rule", "this CPU"]),
]


@pytest.mark.parametrize(("changes", "names"), LINES)
def test_the_lines_of_a_picture(changes, names):
    records = [CALL | change | {"context": n, "tokens_s": n / 8} for n in (128, 64) for change in changes]
    records += [CALL | {"tokens_s": None, "dtype": "f32"}]  # has no time, and is no line
    result = shown(rows_png(records, "a_$b$", "notes $c$\nmore", "tokens_s"))
    lines = {name: [[64, 8.0], [128, 16.0]] for name in names}
    assert result == {"title": "a_$b$", "notes": "notes $c$\nmore", "lines": lines}
    assert rows_png(records, "", "", "step_tokens_s") is None
    assert shown(rows_png([CALL | {"measure": "step"}], "t", "", "tokens_s"))["lines"] == {"": [[64, 2.0]]}
