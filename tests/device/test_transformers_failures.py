"""A forward or a generate of a ZincCache that failed anywhere can be made again, or says why it cannot."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import raising
from tiny_models import prompt
from zinc_models import cache_of, equal, generate, model_of, padded, torch

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache.sequence import Sequence

NATIVE = True
ONE_DISPATCHER = True
pytestmark = pytest.mark.usefixtures("models_may_attend")


class Broken(Exception):
    """Raised in a model's forward by a test."""


@contextmanager
def failing(module: Any, error: BaseException, *, behind: bool, after: int = 0) -> Iterator[None]:
    """``module`` raises ``error``, in front of its forward or behind it, once, when it ran ``after`` times."""
    calls = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == after + 1:
            raise error

    handle = (module.register_forward_hook if behind else module.register_forward_pre_hook)(hook)
    try:
        yield
    finally:
        handle.remove()
    assert len(calls) > after, "the module never ran"


@pytest.mark.parametrize("name", ("llama", "qwen3_5", "gemma4", "deepseek_v2"))
def test_a_forward_that_failed_anywhere_can_be_made_again(name: str, device: za.Device) -> None:
    """Every module of the model in turn, in front of it and behind it, in a decode step and in a prompt's chunk."""
    model, ids = model_of(name), prompt(230)
    ran: dict[str, Any] = {}

    def note(module: Any, *_: Any) -> None:
        ran.setdefault(where_is[module], module)

    where_is = {module: where for where, module in model.named_modules()}
    handles = [module.register_forward_pre_hook(note) for module in where_is]
    with cache_of(model, device) as cache:
        model(ids[:, :8], cache=cache)
    for handle in handles:
        handle.remove()
    names = [where for where in ran if not re.search(r"layers\.[12]\.", where)]
    assert {"", "lm_head", "model.norm", "model.embed_tokens", "model.layers.0"} <= set(names), names
    with cache_of(model, device) as cache, cache_of(model, device) as undisturbed:
        tokens = 0
        for i, where in enumerate(names):
            for behind in (False, True):
                step = ids[:, tokens : tokens + (3 if i % 4 == 0 else 1)]
                want = model(step, cache=undisturbed).logits
                error: BaseException = KeyboardInterrupt() if i % 2 else Broken(where)
                with failing(ran[where], error, behind=behind), pytest.raises(type(error)):
                    model(step, cache=cache)
                assert cache.get_seq_length() == tokens, (where, behind)
                assert {n for row in cache.sequences for one in row for n in one.lengths} <= {tokens}
                assert equal(model(step, cache=cache).logits, want), (where, behind)
                tokens += step.shape[1]


@pytest.mark.parametrize("name", ("llama", "qwen3_5"))
def test_a_generate_that_failed_can_be_made_again(name: str, device: za.Device) -> None:
    """In the model, or after it, in the first forward or a later one, in the first turn and the second; padded."""
    model, (ids, mask) = model_of(name), padded(40, 36).values()

    def turn(tokens: int, cache: Any, most: int = 99) -> Any:
        """Five tokens more; interrupted after a forward where the text has more than ``most``."""

        def process(so_far: Any, scores: Any) -> Any:
            if so_far.shape[1] > most:
                raise KeyboardInterrupt
            return scores

        options = {"attention_mask": mask[:, :tokens], "max_new_tokens": 5}
        return generate(model, ids[:, :tokens], cache=cache, logits_processor=[process], **options)

    with cache_of(model, device, max_batch=2) as cache, cache_of(model, device, max_batch=2) as undisturbed:
        for tokens in (9, 30):
            begin, want = cache.get_seq_length(), turn(tokens, undisturbed)
            for after, module in itertools.product((0, 3), (model.lm_head, model.model.layers[-1].mlp)):
                with pytest.raises(KeyboardInterrupt):
                    turn(tokens, cache, tokens + after - 1)
                assert cache.get_seq_length() == begin
                with failing(module, Broken(), behind=True, after=after), pytest.raises(Broken):
                    turn(tokens, cache)
                assert cache.get_seq_length() == begin
            got = turn(tokens, cache)
            assert torch.equal(got[0], want[0]) and equal(got[1], want[1])
            lengths = [[len(sequence) for sequence in one.sequences[0]] for one in (cache, undisturbed)]
            assert lengths[0] == lengths[1]
            ids[:, tokens : tokens + 5] = want[0]


def test_a_step_that_lost_tokens_from_before_it_says_so(device: za.Device) -> None:
    model, ids = model_of("llama"), prompt(12, batch=2)
    with cache_of(model, device, max_batch=2) as cache:
        want = model(ids, cache=cache).logits
        for lose in (lambda: cache.crop(-2), lambda: cache.reorder_cache(torch.tensor([1, 0]))):
            with pytest.raises(Broken), cache.step():
                lose()
                raise Broken
            with pytest.raises(za.StepError, match=r"had cropped or reordered the 12 tokens .*; reset\(\) the cache"):
                model(ids[:, :1], cache=cache)
            cache.reset()
            assert equal(model(ids, cache=cache).logits, want)
        beams = {"num_beams": 2, "max_new_tokens": 6}
        cache.reset()
        tokens = generate(model, ids[:1], cache=cache, **beams)[0]
        cache.reset()
        with failing(model.lm_head, Broken(), behind=True, after=4), pytest.raises(Broken):
            generate(model, ids[:1], cache=cache, **beams)
        assert cache.get_seq_length() == 0 and cache.batch_size == -1
        assert torch.equal(generate(model, ids[:1], cache=cache, **beams)[0], tokens)


def test_rows_are_selected_all_or_none(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have a sequence for each shape of layers; the interrupt comes when the first shape's are forked."""
    forks = [raising(KeyboardInterrupt), *[Sequence.fork] * 3]

    def fork(sequence: Sequence) -> Sequence:
        return forks.pop()(sequence)

    model = model_of("gemma4")
    with cache_of(model, device, max_batch=3) as cache:
        model(prompt(12, batch=2), cache=cache)
        before = cache.sequences
        monkeypatch.setattr(Sequence, "fork", fork)
        with pytest.raises(KeyboardInterrupt):
            cache.batch_select_indices([1, 1, 1])
        assert cache.sequences == before and not any(each.pool.counts().extra for each in cache.caches)


@pytest.mark.parametrize("name", ("qwen3_5", "falcon_h1", "lfm2"))
def test_a_recurrent_state_is_not_rolled_back(name: str, device: za.Device) -> None:
    model, ids = model_of(name), prompt(12)
    with cache_of(model, device) as cache:
        want = model(ids, cache=cache).logits
        twin = cache.fork()
        text = r"got 12 tokens to be cut to 10 .* keeps no past; expected no cut"
        with pytest.raises(errors.UnsupportedError, match=text):
            cache.crop(-2)
        assert cache.get_seq_length() == 12
        first = model(ids, cache=cache).logits
        assert equal(model(ids, cache=twin).logits, first)
        cache.reset()
        assert equal(model(ids, cache=cache).logits, want)
        if name != "lfm2":  # for whose convolutions transformers records a past
            with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
                generate(model, prompt(13), cache=cache, prompt_lookup_num_tokens=4)
