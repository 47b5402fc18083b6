"""The cost model of calls that the planner cuts: several rows of a sequence, and requests that share a prefix."""

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from zinc_attn import AttnShape, plan_splits
from zinc_attn.planning import sharing
from zinc_attn.tools.cost import CARDS, calls, predict, predict_call, predict_requests, predict_rows

QWEN, R9700 = AttnShape(16, 2, 256), CARDS["r9700"]
SHAPES = ("16/2/256", "32/8/128", "9/3/64")
DOC = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", (*SHAPES, "32/32/128", "40/8/128"))
def test_rows_that_share_keys_take_no_longer(monkeypatch, text):
    """From 8 rows on at no length more than 2 % longer than side by side, and with small groups much less."""
    calls = [(count, context) for count in (8, 12, 24) for context in (1024, 8192, 32768)]
    shape = AttnShape.parse(text)
    shared = [predict_rows(shape, R9700, *call).total_us for call in calls]
    assert predict_call(plan_splits(32768, shape, q_len=8), R9700).total_us == shared[2]
    monkeypatch.setattr(sharing, "SEQUENCE_ROWS", 1 << 20)
    alone = [predict_rows(shape, R9700, *call).total_us for call in calls]
    ratios = [a / b for a, b in zip(shared, alone, strict=True)]
    assert max(ratios) < 1.02
    assert (min(ratios) < 0.8) == (text in ("32/8/128", "9/3/64", "32/32/128")), ratios


@pytest.mark.parametrize("text", SHAPES)
def test_few_rows_are_the_call_of_predict(text):
    """Up to the causal triangle, which is a few leaves here: rows below 8 share nothing."""
    shape = AttnShape.parse(text)
    for count, context in ((1, 512), (1, 8192), (4, 8192), (7, 8192), (1, 131072)):
        old = predict(plan_splits(context, shape, q_len=count), R9700)
        new = predict_rows(shape, R9700, count, context)
        assert new.total_us == pytest.approx(old.total_us, rel=0.01 if count > 1 else 1e-12)
        assert new.submissions == 1 and new.workgroups <= old.workgroups


def test_prompts_are_what_the_model_says():
    times = [
        f"{predict_rows(AttnShape.parse(text), R9700, n, n).total_us / 1e3:.1f} ms"
        for text, n in product(("16/2/256", "32/8/128"), (8192, 32768))
    ]
    assert "{} at 8k and {} at 32k keys; 32/8/128 takes {} and {}.".format(*times) in " ".join(DOC.split())


@pytest.mark.parametrize("text", SHAPES)
def test_prompts(text):
    shape, found = AttnShape.parse(text), []
    for n in (2048, 8192, 32768, 131072):
        p = predict_rows(shape, R9700, n, n)
        assert p.total_us == pytest.approx(p.pass1_us + p.merge_us)
        assert p.pass1_us >= max(p.waves_us, p.memory_us + p.partial_us, p.again_us) * 0.999
        assert p.waves_us >= p.issue_us * 0.999
        found.append(p)
    assert all(4 < b.total_us / a.total_us < 25 for a, b in pairwise(found)), "a prompt's pairs grow with its square"


def test_samples_stand_for_all_submissions(monkeypatch):
    few = predict_rows(QWEN, R9700, 16384, 16384)
    assert predict_rows(QWEN, R9700, 65536, 1 << 24).submissions > 18, "the longest context"
    monkeypatch.setattr(calls, "SAMPLES", 10**6)
    every = predict_rows(QWEN, R9700, 16384, 16384)
    assert few.submissions == every.submissions > 18 and few.total_us == pytest.approx(every.total_us, rel=0.005)


@pytest.mark.parametrize("text", (*SHAPES, "32/4/128", "64/8/64", "24/4/256"))
def test_shared_prefixes(text):
    """One request is the call of predict; more take longer, and no less than reading every key once."""
    shape = AttnShape.parse(text)
    for prefix in (0, 2048, 32768, 131072):
        times = [predict_requests(shape, R9700, requests, prefix, 256) for requests in (1, 2, 8, 32)]
        alone = [predict_requests(shape, R9700, requests, prefix, 256, cascade=False) for requests in (1, 2, 8, 32)]
        assert times[0] == alone[0] == pytest.approx(predict(plan_splits(prefix + 256, shape), R9700).total_us)
        assert all(a < b for a, b in pairwise(alone)) and all(b / a > 0.97 for a, b in zip(times, alone, strict=True))
        for requests, us in zip((1, 2, 8, 32), times, strict=True):
            assert us > (requests * 256 + prefix) * shape.kv_bytes_per_token() / R9700.bandwidth / 1e3
    wide = AttnShape(16, 1, 256), R9700, 8, 4096, 64, "f16"
    assert predict_requests(*wide, True) == predict_requests(*wide, False), "groups of more than 8 share nothing"


@pytest.mark.parametrize(("dtype", "worst", "slower", "gain"), [("f16", 0.99, 0, 0.95), ("q8_0", 0.87, 8, 0.98)])
def test_sharing_seldom_costs_much(dtype, worst, slower, gain):
    """What docs/cost-model.md says of the rule, beside a rule that knew the model."""
    found, best = [], []
    for text, requests, prefix in product(
        ("16/2/256", "32/8/128", "9/3/64", "24/4/256", "32/4/128", "64/8/64"),
        (2, 5, 7, 8, 16, 32),
        (1, 2, 4, 6, 12, 24, 64, 128),
    ):
        call = AttnShape.parse(text), R9700, requests, prefix << 10, 16, dtype
        by_rule, always, alone = (predict_requests(*call, how) for how in (None, True, False))
        found.append(alone / by_rule)
        best.append(max(alone / always, 1.0))
    assert len(found) == 288 and min(found) > worst and sum(one < 0.97 for one in found) == slower
    assert round(np.log(found).sum() / np.log(best).sum(), 2) == gain
    words = " ".join(DOC.split())
    assert f"{gain:.0%}".replace("%", " %") in words and f"at most {1 - worst:.0%}".replace("%", " %") in words
    assert (f"{slower} of 288 calls" if dtype == "f16" else f"and {slower} calls") in words
