"""The picture of measured rows: its lines, their names, and where these stand."""

import numpy as np
import pytest
from commands import shown

from zinc_attn.tools.measure import rows_png
from zinc_attn.tools.measure.picture import POINTS, _name_lines

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


@pytest.mark.parametrize(
    ("ends", "together"), [((900, 3, 1, 2), 2), ((999, 500, 998, 997), 2), ((1, 500, 999, 250), 0)]
)
def test_names_of_lines_do_not_cover_each_other(ends, together):
    """They keep their order, lie within the axes, and stand beside the ends where there is room."""
    axes = matplotlib.Figure().subplots()
    axes.set_ylim(0, 1000)
    bottom, height, scale = axes.bbox.y0, axes.bbox.height, 72 / axes.figure.dpi
    _name_lines(axes, [(f"{end}\nb", (1, end), "#000000") for end in ends])
    told = {text.get_text(): (bottom + text.xy[1] * height / 1000) * scale + text.xyann[1] for text in axes.texts}
    names, middles = zip(*sorted(told.items(), key=lambda item: item[1]), strict=True)
    gaps = np.diff(middles)
    assert names == tuple(f"{end}\nb" for end in sorted(ends)) and gaps.min() >= 2 * POINTS - 1e-6
    assert middles[-1] <= axes.bbox.y1 * scale - POINTS + 1e-6
    assert sum(gaps < 2 * POINTS + 1e-6) == together
