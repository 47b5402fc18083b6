"""The picture of measured rows: its lines, their names, and where these stand."""

import numpy as np
import pytest
from commands import shown

from zinc_attn.tools.measure import rows_png
from zinc_attn.tools.measure.picture import POINTS, _name_lines

matplotlib = pytest.importorskip("matplotlib.figure", reason="pip install 'zinc-attn[cli]'")

CALL = {"device": "a GPU (RADV)", "device_kind": "discrete", "runtime": "vulkan", "shape": "4/2/64", "dtype": "f16"}
CALL |= {"measure": "call", "layout": "auto"}
LAYOUTS = {"auto": "split rule", "1": "one split", "8": "8 splits", "size:2048": "splits of 2048 keys"}
LAYOUTS |= {"none": "weights alone"}


@pytest.mark.parametrize(
    ("changes", "names"),  # what differs between the records of a context, and how the picture names their lines
    [
        ([{"layout": layout} for layout in LAYOUTS], [*LAYOUTS.values()]),
        ([{}, {"runtime": "kompute"}], ["vulkan", "kompute"]),
        ([{}, {"dtype": "q8_0"}], ["f16", "q8_0"]),
        ([{}, {"device": "this CPU", "runtime": "torch float32", "layout": "–"}], ["a GPU · split rule", "this CPU"]),
    ],
)
def test_lines_have_the_names_of_what_differs(changes, names):
    records = [CALL | change | {"context": n, "tokens_s": n / 8} for n in (128, 64) for change in changes]
    records.append(CALL | {"context": 64, "tokens_s": None, "shape": "9/3/64"})  # has no time, and is no line
    assert shown(rows_png(records, "", "", "tokens_s"))["lines"] == {name: [[64, 8.0], [128, 16.0]] for name in names}


@pytest.mark.parametrize(
    ("ends", "together"), [((900, 3, 1, 2), 2), ((999, 500, 998, 997), 2), ((1, 500, 999, 250), 0)]
)
def test_names_of_lines_do_not_cover_each_other(ends, together):
    """They keep the order of the ends, lie within the axes, and stand beside the ends where there is room."""
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
