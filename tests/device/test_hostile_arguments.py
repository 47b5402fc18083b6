"""No argument, however wrong, gives anything but a result or a ZincAttnError, and none does harm: on a device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import ON_DEVICE, Bench, Make, walk

import zinc_attn as za

NATIVE = ONE_DISPATCHER = True


@pytest.fixture(scope="module")
def bench(device: za.Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(device, tmp_path_factory.mktemp("hostile"))
    yield made
    made.sharded.close()
    made.cache.close()


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_result_or_a_typed_refusal(name: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name in ("KVCache.load", "Sequence.save"):
        pytest.importorskip("safetensors")
    make: Make = lambda: ON_DEVICE[name](bench)  # noqa: E731
    assert walk(make) == []
    bench.good_call()
