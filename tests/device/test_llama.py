"""llama.cpp with the back end of native/ggml: ggml's own tests, one model's logits, refusals.

scripts/test --llama builds llama.cpp and the back end first, and runs these tests; no other run has them. The oracle's
bits are in ``test_ggml.py``, which needs no llama.cpp.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import faults
import pytest
from llama_programs import BIN, MODEL, OURS, ROOT, llama_random, run, serving

pytestmark = pytest.mark.llama
LOAD = (sys.executable, ROOT / "scripts" / "lib" / "llama_load.py", BIN / "llama-server")


def test_the_own_runtime():
    """Of ``examples/own_runtime.py``, with this model: the text of transformers' eager attention."""
    done = run(sys.executable, ROOT / "examples" / "own_runtime.py", MODEL, 210, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("210 tokens, equal to those of transformers' eager attention\n")


# --- ggml's own judge ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "chosen", "count"),
    [
        ("SET_ROWS", r"type_dst=(f32|f16|bf16|q8_0|q[45]_[01]|iq4_nl),", 271),
        ("FLASH_ATTN_EXT", r"kv=113,nb=(1|3),.*max_bias=8.*type_K=q", 60),
        ("FLASH_ATTN_EXT", r"hsk=(40|65),.*nb=3,", 56),
        ("FLASH_ATTN_EXT", r"hsk=(192|576),.*kv=113,nb=1,", 25),
        ("MUL_MAT", r"type_a=(q4_1|q6_K|f16),type_b=f32,m=16,n=(1|9),k=256,bs=\[(1|3),1\],nr=\[(1|2),1\]", 16),
        ("ROPE", r"ne_a=\[128,32,2,1\],n_dims=128,mode=(0|2|8|24|40),.*ff=1,v=1", 26),
        ("ROPE_SET_ROWS", ".", 61),
        ("GATED_DELTA_NET_CACHE_FUSION", ".", 5),  # states go straight to the cache
        ("SSM_CONV_BIAS_SILU", r"ne_a=.*,4,1\]", 36),
        ("SSM_SCAN_ROLLBACK", ".", 2),
        ("TOPK_MOE", r"ne=\[(8|128),(1|22),1,1\]", 20),
        ("MUL_MAT_ID", r"type_a=(q4_K|f16|mxfp4).*n_mats=4,n_used=2,b=(0|1),m=512,n=(1|32),", 12),
    ],
)
def test_backend_ops(operation, chosen, count):
    done = run(BIN / "test-backend-ops", "test", "-b", "ZINC0", "-o", operation, "-p", chosen)
    passed = re.search(r"(\d+)/(\d+) tests passed", done.stdout)
    assert done.returncode == 0 and passed, done.stdout[-2000:]
    assert passed[1] == passed[2] and int(passed[1]) >= count, passed[0]


def test_random_models_of_other_architectures(tmp_path):
    """llama.cpp's program never loads libraries of back ends, so that one whose constructor does is put before it. It
    compares logits with the CPU's, and the bits before and after saving."""
    preload = tmp_path / "preload.so"
    code = "void ggml_backend_load_all(void); __attribute__((constructor)) void load(void) { ggml_backend_load_all(); }"
    link = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", preload, f"-L{BIN}", "-lggml", f"-Wl,-rpath,{BIN}"]
    subprocess.run(link, input=code, text=True, check=True)
    mixing = run(BIN / "test-llama-archs", "-b", "ZINC0", "-a", "^minimax-01$", LD_PRELOAD=str(preload))
    assert "the model has sums over the tokens of a batch (qkv_diag-0)" in mixing.stderr, mixing.stderr
    wanted = "^(gemma3|qwen3|phi3|qwen35|nemotron_h|qwen35moe|gpt-oss)$"
    done = run(BIN / "test-llama-archs", "-b", "ZINC0", "-a", wanted, LD_PRELOAD=str(preload))
    assert done.returncode == 0 and len(re.findall(r"OK.*\|.*OK", done.stdout)) == 7, done.stdout + done.stderr
    assert "the CPU" not in done.stderr and "sums over the tokens" not in done.stderr, done.stderr


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Four layers of the model."""
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    left = ",".join(map(str, range(3, 29)))
    run(BIN / "llama-quantize", "--prune-layers", left, "--allow-requantize", MODEL, file, "COPY")
    return file


# --- a model ---------------------------------------------------------------------------------------------------------


def digests(model, *arguments, cache="f16", **environment):
    """The back end's digests of ways, by their names. None but the promise is said of it."""
    table = run(OURS / "digests", model, cache, 130, *arguments, **environment)
    assert table.returncode == 0, table.stdout + table.stderr
    said = [line for line in table.stderr.splitlines() if line.startswith("ggml-zinc")]
    assert len(said) == 2 and said[1].endswith("the promise holds"), said
    return {line[:42].strip(): line.split()[-1] for line in table.stdout.splitlines()[1:-1]}


@pytest.fixture(scope="session")
def whole(small):
    """The digests of the model whole on a Vulkan device."""
    return digests(small)


# Where each of the model's layers is, with the keys of those that stay on the CPU in ggml's buffers.
SPLITS = {
    "the processor alone": {"ZINC_ATTN_DEVICE": "cpu"},
    "the processor, two layers on the CPU": {"ZINC_ATTN_DEVICE": "cpu", "LLAMA_ARG_N_GPU_LAYERS": "2"},
    "two layers on the CPU": {"LLAMA_ARG_N_GPU_LAYERS": "3"},
    "all layers on the CPU": {"LLAMA_ARG_N_GPU_LAYERS": "0"},
}


@pytest.mark.parametrize("split", SPLITS)
def test_what_stays_on_the_cpu_has_the_bits(small, whole, split):
    found = digests(small, **SPLITS[split])
    assert found == whole


@pytest.mark.parametrize(("arithmetic", "cache"), [("fused", "f16"), ("integer", "q8_0")])
def test_another_arithmetic_has_one_digest_of_its_own(small, arithmetic, cache):
    """Of ubatches, slots and histories on the processor, with layers on the CPU, too, and on a Vulkan device."""
    split, ways = SPLITS["the processor, two layers on the CPU"], ("ubatch 64", "slots", "and")
    canonical = digests(small, "in", cache=cache, **split)  # also where positions move, in a cache of blocks
    told = {"cache": cache, "ZINC_ATTN_ARITHMETIC": arithmetic}
    found = [digests(small, way, **told, **split) for way in ways] + [digests(small, "in two calls", **told)]
    (digest,) = {one for some in found for one in some.values()}
    assert digest not in canonical.values()


def test_integer_attention_with_a_float_cache_is_refused(small):
    """Where keys are on the CPU, too, whose own attention would take them."""
    for layers, name in (("99", "cache_k_l0"), ("0", "cache_k_l0 .*")):
        told = {"ZINC_ATTN_ARITHMETIC": "integer", "LLAMA_ARG_N_GPU_LAYERS": layers}
        done = run(OURS / "digests", small, "f16", 130, "ubatch 512", **told)
        reason = f"{name}: got type f16 with ZINC_ATTN_ARITHMETIC=integer, expected q8_0, q5_0, q4_0 or iq4_nl"
        assert done.returncode and re.search(reason, done.stderr), done.stderr


def test_experts_on_the_cpu_have_the_bits(hybrid):
    ways = [
        digests(hybrid, "ubatch 16", **more)
        for more in ({}, {"LLAMA_ARG_CPU_MOE": "1"}, SPLITS["two layers on the CPU"])
    ]
    assert ways[0] and ways[1] == ways[0] and ways[2] == ways[0]


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "hybrid.gguf"
    sizes = {"recurrent": 4, "key_heads": 2, "value_heads": 4, "state": 64, "sections": (11, 11, 10, 0)}
    model = llama_random.Model("qwen35moe", 4, 512, 320, 4, 2, 64, 64, 1e7, 256, 8, 4, 256, **sizes)
    llama_random.write(model, "small", 4, file)
    return file


def test_a_step_has_the_logits_of_one_split_at_any_depth(hybrid, tmp_path):
    """1,500 keys are three nodes; the command ends where the split rule's logits and one split's differ. The model has
    three delta nets and experts, and a layer has about 11 barriers."""
    done = run(SCRIPT, "sweep", hybrid, "--contexts", "200,1500", "--steps", "1", "--out", tmp_path)
    table = done.stdout.splitlines()
    assert "the CPU" not in done.stderr and table[0].endswith("; 108 dispatches, 47 barriers"), table[0]
    assert [line.split()[0] for line in table[5:]] == ["200", "1,500"]
    rows = json.loads((tmp_path / "llama-sweep.json").read_text())
    assert {row["layout"] for row in rows} == {"auto", "1", "none"}
    assert {row["logits"] for row in rows if row.get("logits")} == {"0a302ab36fa467b0", "4915cb47743a2532"}
    assert (tmp_path / "llama-sweep.png").stat().st_size > 10_000


def test_a_program_of_scripts_llama_has_the_device_unless_another_is_named(small):
    for told, here in (((), True), (("-dev", "none"), False)):
        few = ("-p", "x", "-n", "1", "-no-cnv", "-ngl", "99", "-fa", "on", "-lv", "4")
        done = run(SCRIPT, "llama-completion", "-m", small, *few, *told)
        assert done.returncode == 0 and ("ZINC0 model buffer size" in done.stderr) == here, done.stderr[-2000:]


def test_one_prompt_has_one_answer_under_load(small):
    done = run(*LOAD, small, 40)
    assert done.returncode == 0 and re.search(r"^zinc_attn +1 answer,", done.stdout, re.M), done.stdout + done.stderr


GREEDY = {"temperature": 0, "n_probs": 3, "return_tokens": True}
STORY = "Once upon a time there was a sum whose last bit was decided by the order of its terms"


def bits(reply):
    return reply["tokens"], reply["completion_probabilities"]


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setenv("GGML_BACKEND_PATH", str(OURS / "libggml-zinc.so"))


def test_a_draft_model_does_not_change_the_text(tmp_path, ours):
    """A coarser copy of the model guesses up to eight tokens ahead; some guesses are taken back. llama-server has a
    log-probability only for tokens that were no guess; the logits of guesses are in the table of digests."""
    draft = tmp_path / "draft.gguf"
    run(BIN / "llama-quantize", "--allow-requantize", MODEL, draft, "Q2_K")
    guesses = ("--spec-type", "draft-simple", "-md", draft, "-devd", "ZINC0", "-ngld", "99", "--spec-draft-n-max", "8")
    replies = []
    for options in ((), guesses):
        with serving(MODEL, *options) as post:
            replies.append(post("/completion", prompt="Once upon a time", n_predict=32, **GREEDY))
    plain, guessed = replies
    assert 0 < guessed["timings"]["draft_n_accepted"] < guessed["timings"]["draft_n"]
    assert guessed["tokens"] == plain["tokens"]
    assert guessed["completion_probabilities"][0] == plain["completion_probabilities"][0]


def test_a_saved_slot_goes_on_with_the_same_bits(tmp_path, small, ours):
    asked = {"prompt": STORY, "n_predict": 4, **GREEDY}
    with serving(small, "--slot-save-path", tmp_path, "-cram", "0") as post:
        first = post("/completion", id_slot=0, **asked)
        assert post("/slots/0?action=save", filename="story")["n_saved"] > 20
        post("/completion", id_slot=0, **asked | {"prompt": "Something else. " + STORY})
        for slot, action, computed in (
            (0, "restore", 1),
            (1, "restore", 1),
            (0, "erase", first["timings"]["prompt_n"]),
        ):
            post(f"/slots/{slot}?action={action}", filename="story")
            again = post("/completion", id_slot=slot, **asked)
            assert (bits(again), again["timings"]["prompt_n"]) == (bits(first), computed), (slot, action)


def test_a_text_longer_than_the_context_does_not_depend_on_the_batch(small, ours):
    """llama-server then drops tokens and turns the K of the others (K-shift)."""
    replies = []
    for options in (("-np", "1", "-c", "256"), ("-np", "2", "-c", "512", "-ub", "8")):
        with serving(small, *options, "--context-shift") as post:
            if replies:
                post("/completion", prompt="Another one", n_predict=2, id_slot=1)
            replies.append(post("/completion", prompt=STORY, n_predict=300, id_slot=0, **GREEDY))
    assert replies[0]["timings"]["predicted_n"] == 300 and bits(replies[0]) == bits(replies[1])


def test_results_beyond_a_binding_come_in_pieces(small):
    """On lavapipe those of 700 tokens are, of 49,152 logits each. llama-perplexity's threads sum in any order."""
    here = ("--device", "ZINC0", "-ngl", "99", "-fa", "on")
    told = ("-m", small, "-f", ROOT / "CHANGELOG.md", "--chunks", "1", "-c", "1400", *here)
    found = []
    for ubatch in ("1400", "350"):
        done = run(BIN / "llama-perplexity", *told, "-b", "1400", "-ub", ubatch)
        assert "the CPU (" not in done.stderr
        found.append(float(re.search(r"PPL = ([\d.]+)", done.stdout + done.stderr)[1]))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.parametrize("program", ["test-state-restore-fragmented", "test-save-load-state"])
def test_states(program, tmp_path):
    here = ("--device", "ZINC0", "-ngl", "99", "-fa", "on", "-t", "1")  # more threads would wait for each other
    done = run(BIN / program, "-m", MODEL, *here, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


WHOLE = r"the model is here whole but for the look-up of tokens \(\d+ operations, \d+ of attention\): the promise holds"
SHARED = (
    r"another device has a part of the model \(.*\); logits may depend on the batch: "
    "expected -ngl 99 and no -ot, or libzinc_cpu.so beside libggml-zinc.so"
)
OFF = "flash attention is off, so that results depend on where keys lie; expected -fa on"
ELSEWHERE = r"attention is left to another device and its bits: the KV cache is not on ZINC0: .* no --no-kv-offload"
NO_PART = "-ngl 99", "-ngl 99 -ot ^token_embd=CPU"  # of a model with an output of its own
PARTS = ("-ngl 0", "-ngl 2", *(f"-ngl 99 {told}" for told in ("-ncmoe 2", "-ncmoe 99", "-ot exps=CPU")))
PARTS += tuple(f"-ngl 99 -ot {name}=CPU" for name in ("ffn_down_exps", "output_norm"))


@pytest.mark.parametrize(
    ("processor", "of_hybrid", "told", "reason"),
    [
        *((False, True, f"{told} -fa on", WHOLE) for told in NO_PART),
        *((False, True, f"{told} -fa on", SHARED) for told in PARTS),
        *((True, True, f"{told} -fa on", WHOLE) for told in (*PARTS, "-ngl 99 -nkvo 1")),
        (False, False, "-ngl 99 -fa on", WHOLE),
        (False, False, "-ngl 99 -fa on -ot token_embd=CPU", SHARED),
        (False, False, "-ngl 99 -fa off", OFF),
        (False, False, "-ngl 99 -fa on -nkvo 1", ELSEWHERE),
    ],
)
def test_what_runs_where_is_said_in_a_line(small, hybrid, processor, of_hybrid, told, reason):
    """With the processor, nothing that stays on the CPU is another device's."""
    few = ("-p", "2", "-n", "0", "-r", "1", "-t", "1", "--no-warmup")
    command = BIN / "llama-bench", "-m", hybrid if of_hybrid else small, "-dev", "ZINC0", *few, *told.split()
    done = run(*command, **({} if processor else {"ZINC_ATTN_CPU": "0"}))
    said = [line.removeprefix("ggml-zinc: ") for line in done.stderr.splitlines() if line.startswith("ggml-zinc")]
    assert processor or said[0].endswith("; it takes a model with --device ZINC0 -ngl 99 -fa on")
    assert done.returncode == 0 and len(said) == 2 and re.fullmatch(reason, said[1]), said


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["vkQueueSubmit 12 -1 0 0", "vkBeginCommandBuffer 12 -2 0 0"])
def test_a_failed_call_ends_its_request_of_a_server_and_no_other(small, fault, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", str(faults.shim()))
    monkeypatch.setenv("ZINC_ATTN_FAULT", fault)
    replies, errors = [], []
    with serving(small) as post:
        for _ in range(5):
            try:
                replies.append(bits(post("/completion", prompt="Once upon a time", n_predict=3, **GREEDY)))
            except urllib.error.HTTPError as error:
                errors.append(error.code)
    assert errors == [500] and all(reply == replies[0] for reply in replies)


def test_a_kit_proves_this_device_without_this_clone(tmp_path):
    """Bits, speeds and the report; and another digest in the kit is told."""
    archive, kit = tmp_path / "kit.tar.xz", tmp_path / "zinc-kit"
    done = run(ROOT / "scripts" / "kit", archive, ZINC_ATTN_KIT_MODELS="tinyllama-1.1b:1", XZ_DEFAULTS="-1")
    assert done.returncode == 0 and archive.stat().st_size < 60e6, done.stderr
    run("tar", "-C", tmp_path, "-xf", archive)
    drivers = {x: y for x, y in os.environ.items() if x.startswith(("LP_", "VK_")) and x != "VK_ADD_DRIVER_FILES"}
    environment = {"PATH": "/usr/bin:/bin", **drivers}  # without SwiftShader, which would be the first device
    options = ("--quick", "--shape", "4/2/64", "--contexts", "130", "--minutes", "20", "--timeout", "600")
    done = subprocess.run([kit / "zinc-kit", *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    report, text = (kit / "report" / f"report.{kind}" for kind in ("json", "md"))
    assert done.returncode == 0 and str(tmp_path) not in report.read_text() + text.read_text(), done.stderr
    (rows,) = (step["rows"] for step in json.loads(report.read_text())["steps"] if step["tool"] == "llama")
    assert rows[0] == {"case": "llama.cpp tinyllama-1.1b 1", "status": "pass", "faults": []} and "run" in rows[1]
    speeds = [(row["test"], row["round"]) for row in rows if row.get("back_end") == "zinc_attn" and row["tokens_s"] > 0]
    assert speeds == [("pp16", 1), ("tg2", 1), ("pp16", 2), ("tg2", 2)]
    expected = kit / "llama" / "expected.json"
    expected.write_text(expected.read_text().replace('"1500": "', '"1500": "not '))
    done = run(sys.executable, kit / "llama" / "llama_kit.py", "tinyllama-1.1b", 1, "quick")
    (row, *_) = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1 and row["status"] == "FAIL", done.stderr
    assert [fault["variation"] for fault in row["faults"]] == [
        f"{way}, 1500 tokens before" for way in ("split rule", "one split", "no matrix units")
    ]


def test_without_a_device_the_reason_is_said_and_llama_goes_on():
    done = run(BIN / "test-backend-ops", "support", "-b", "ZINC0", ZINC_ATTN_DEVICE="none such")
    assert "ggml-zinc: no device: " in done.stderr and "'none such'" in done.stderr


SCRIPT = ROOT / "scripts" / "llama"


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (
            (SCRIPT, "llama-serve"),
            "got llama-serve, expected model, digests, load, bench, sweep, random, ",
        ),
        ((SCRIPT, "llama-server", "-m", "no.gguf"), "-m: got no.gguf, expected a file"),
        (("env", "ZINC_ATTN_DEVICE=nix", SCRIPT, "digests", MODEL), "no device: no Vulkan device matches 'nix'"),
        ((SCRIPT, "digests"), "digests: got no model, expected a model's file"),
        ((SCRIPT, "load", "no.gguf"), "load: got no.gguf, expected a model's file"),
        ((OURS / "digests", MODEL, "f16", "12"), "got type f16 and 12 tokens, expected a type of ggml's"),
        ((*LOAD, MODEL, "x"), "REQUESTS: got x, expected a number from 1 on"),
    ],
)
def test_wrong_arguments_are_errors_of_a_line(told, text):
    done = run(*told)
    assert done.returncode and len(done.stderr.splitlines()) == 1 and text in done.stderr
