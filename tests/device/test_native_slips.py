"""Slips of one token in native/ are seen by the tests that a table names: the default run tries a few, ``--full`` all.

What is not in the table: the generated sizes and rules, which are compared with the package's numbers.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from c_cases import CASES
from c_host import NATIVE, ROOT, needs_compiler
from slips import check_table, slips
from support import FULL

pytestmark = needs_compiler
TESTS = {
    **{name: f"device/test_c_engine.py::test_a_case_has_the_oracle_s_bits[default-vulkan-{name}]" for name in CASES},
    "refused calls": "device/test_c_library.py::test_what_a_call_refuses",
    "largest key": "device/test_c_library.py::test_too_large_a_key",
    "scales": "device/test_c_library.py::test_scales_of_heads",
    "copies": "device/test_c_library.py::test_a_copied_page",
    "recordings": "device/test_c_engine.py::test_recordings_and_steps",
    "rows of hosts": "device/test_c_engine.py::test_rows_that_are_no_good",
    "losses": "device/test_c_engine.py::test_a_device_that_may_be_lost",
    "failures": "device/test_c_engine.py::test_every_call_of_vulkan_fails",
    "closing": "device/test_c_engine.py::test_an_object_in_use",
    "together": "device/test_c_library.py::test_rows_of_a_prompt",
    "planned": "device/test_c_library.py::test_items_are_the_planner_s",
    "refused options": "device/test_c_library.py::test_what_opening_refuses",
    "workgroups": "host/test_c_host.py::test_workgroups_serve",
    "a run": "device/test_embed_c.py::test_the_digest_is_the_oracle_s",
    "waves": "device/test_embed_c.py::test_subgroups_of_32",
    "codec": "host/test_c_host.py::test_rows_have_the_bits",
    "encoded": "host/test_c_host.py::test_encoded_rows_have_the_bits",
    "lists": "host/test_ggml_lists.py::test_",
    "ggml": "device/test_ggml.py::test_",
    "experts": "device/test_ggml.py::test_experts",
    "graphs": "device/test_ggml.py::test_a_graph_has",
    "fused": "device/test_ggml.py::test_a_fusion_saves",
    "places": "device/test_ggml.py::test_a_line_says",
}


TABLE = """
src/work.c
the longest request of a table: za_max(tokens, call->request[i].tokens) → call->request[i].tokens @ plain
a row without a key has a state: za_max(last, 1) → za_max(last, 0) @ plain
keys behind a row: r->noncausal ? r->tokens : behind → r->noncausal ? behind : behind @ plain
the first key of a window: behind - call->window : 0; → behind + 1 - call->window : 0; @ filled up
the mask of a row: to->mask + row * keys → to->mask + keys @ plain
a row's own key: row - request->q_len → row + 1 - request->q_len @ wide
the place of a new row: request->new_rows + row → request->new_rows @ plain
a scale of a head: (double)scales[kv_head] → (double)scales[0] @ scales
new rows that a step has not: = NO_TOKEN; → = NO_TOKEN - NO_TOKEN; @ plain
the unit of a score: (call->softcap != 0 ? 1 : LOG2E) → (call->softcap != 1 ? 1 : LOG2E) @ plain
where masks begin: (counts->rows ? shape->q_heads → (counts->rows ? shape->kv_heads @ cells
the first page of a layer: layer->first_page → 0 * layer->first_page @ plain
the states of a request: to->state += request->q_len * l-> → to->state += l-> @ plain
tiles of a page: >> shift > 1) → >> shift > 0) @ a run
where rows that share begin: row / each * each → row / each * 1 @ together
rows that see a whole node: .limit / KEYS_PER_NODE : 0; → .limit / KEYS_PER_NODE + 1 : 0; @ together
tables of shared items: table + base, → table, @ together
heads of shared items: shared->head_table += base → shared->head_table += 0 * base @ together
the next split: node_of(l, i + 1) → node_of(l, i) @ planned
src/shape.c
rows by addresses: / (s->group + 1)) → / s->group) @ workgroups
a stride that is too short: stride >= least && → stride + 2 >= least && @ refused options
src/record.c
the second piece of rows: {from.offset + i * from_step → {from.offset + count * from_step @ rows
src/call.c
the largest key so far: cache->largest_k = largest_k; → cache->largest_k = 0; @ largest key
the scales of V: scales ? scales + shape->kv_heads → scales ? scales @ rows of bytes
src/cache.c
the scales of a layer: scales[i / heads * 2 * heads → scales[i / heads * heads @ scales
the target of a copy: to.offset += target * bytes; → to.offset += (target + 1) * bytes; @ copies
a copy in every layer: bytes, cache->layers); → bytes, 1); @ copies
the last row of a cache: * cache->steps.head + 1; → * cache->steps.head; @ rows of hosts
a page of rows: stride * shape->page_size * cache → stride * cache @ rows of 40
src/check.c
a page behind the last: page_table[i] >= pages → page_table[i] > pages @ refused calls
the length of a table: r->pages < used → r->pages + 1 < used @ refused calls
places that touch: a->offset >= b->offset → a->offset > b->offset @ plain
as much as the room: got <= most || → got < most || @ recordings
src/prepared.c
the smallest cache: pages < p->pages[slot] → pages > p->pages[slot] @ recordings
a slot that is reset: p->recorded &= ~( → p->recorded &= ( @ recordings
what a prepared call has: free(p->scales); → ; @ recordings
the words of a slot: {p->work.handle, slot * p → {p->work.handle, 0 * p @ plain
src/device.c
a lost device: za_error_code() == ZA_LOST) → za_error_code() == ZA_BUSY) @ failures
what may be running still: (result != VK_SUCCESS) device->lost → (result == VK_TIMEOUT) device->lost @ losses
src/objects.c
subgroups of 32: device->wave32 ? &wave32 → !device->wave32 ? &wave32 @ waves
src/attn.c
a cache in use: attn->caches || → !attn->caches && @ closing
src/blocks.c
rounding of q4_0: half + 0.5F → half @ codec
a block's upper half: (i == low ? 0 : 4) → (i == low ? 4 : 0) @ encoded
src/floats.c
ties to even: (bits >> dropped & 1); → 1; @ codec
ggml/cells.cpp
a cell that is written again: order_[place_[cell]] = NO_CELL; → order_[cell] = NO_CELL; @ lists
the older generation: {&known_, &older_} → {&known_, &known_} @ lists
what is forgotten: rows_ >= most_ → rows_ > 3 * most_ @ lists
equal rows that are saved again: known_.erase(group.hash); → known_.erase(0); @ lists
the order of a state: write(group.cells[rank]) → write(group.cells[2 - rank]) @ lists
a hash of all rows: cells.empty() ? 14695981039346656037u : hash, → 14695981039346656037u, @ lists
ggml/lists.cpp
an overlap that goes on: end == pages->end()) → both) @ lists
cells of another stream: % stream.written.step) continue; → % 1) continue; @ lists
the pages of a stream: stream.pages.first + key * stream.pages.step → key @ lists
where biases begin: size_t place = bias->size(); → size_t place = 0; @ lists
ggml/moves.cpp
where a written cell is: size_t(row) * op->nb[1] + → size_t(0) * op->nb[1] + @ ggml
ggml/orders.cpp
the last row of a state: (row + 1) * bytes <= begin + size → (row + 1) * bytes < begin + size @ ggml
ggml/calls.cpp
the mask of a stream: mask + (s % o.mask->ne[3]) * → mask + (0 % o.mask->ne[3]) * @ ggml
ggml's odd slopes: double(2 * (h - whole) + 1) → double(2 * (h - whole) + 2) @ ggml
rows that see more: row.count == last.count + 1 → row.count >= last.count @ ggml
the keys of a mask: request.mask_keys = request.tokens; → request.mask_keys = 1; @ ggml
ggml/plan.cpp
heads before cells: t->ne[2] > 1 ? → t->ne[2] > 9 ? @ ggml
offsets in a plan's key: key.push_back(offset_of(t)) → key.push_back(0) @ ggml
one root for K and V: if (o->k_root == o->v_root || → if ( @ ggml
ggml/products.cpp
experts of a piece: experts[0] = part.expert; → experts[0] = 0; @ experts
where a piece begins: + matrix * w->nb[2]; → + 0 * matrix * w->nb[2]; @ experts
rows of x of a token: (p.op->src[1]->ne[1]); → (p.op->src[1]->ne[3]); @ experts
ggml/elementwise.cpp
swapped halves: (swapped ? a : b).at.offset → (swapped ? b : a).at.offset @ graphs
a product that repeats: && ggml_are_same_shape(op, op->src[1]); → && true; @ graphs
numbers of a unary operation: op->op == GGML_OP_UNARY ? 1 : 0; → op->op == GGML_OP_UNARY ? 0 : 0; @ graphs
ggml/rows.cpp
the number of a norm's groups: rows = groups * uint64_t(op->ne[3]); → rows = uint64_t(op->ne[3]); @ graphs
the mean of a row: GGML_OP_MEAN ? 1.0f / float(terms) → GGML_OP_MEAN ? 1.0f @ graphs
slopes of odd heads: params.half_step = -max_bias / 2 → params.half_step = -max_bias / 1 @ graphs
rotations of another kind: 15 * sizeof *op->op_params → 2 * sizeof *op->op_params @ graphs
rows that are joined: uint32_t(int8->ne[0] / result->ne[0]) → uint32_t(result->ne[0] / int8->ne[0]) @ graphs
ggml/ordering.cpp
pieces of a long row: size / 2 < n; size *= 2 → size < n; size *= 2 @ graphs
the mirror of an exchange: uint32_t(size / 2), true → uint32_t(size / 2), false @ graphs
the order of ARGSORT: op->op_params[0] == GGML_SORT_ORDER_DESC, uint64_t → true, uint64_t @ graphs
ggml/recurrent.cpp
channels of a second norm: params.begins[i] = uint32_t( → params.begins[0] = uint32_t( @ graphs
the factor of a norm's SCALE: c.results[i] == c.norms[i] ? 1 : → c.results[i] != c.norms[i] ? 1 : @ graphs
where states begin: uint32_t(y.at.offset + scores) → uint32_t(y.at.offset) @ graphs
steps of rows of states: of[5].at.s[3] = all.at.s[1]; → of[5].at.s[3] = all.at.s[0]; @ graphs
a scan's decays: const bool by_element = op->src[3]->ne[0] > 1; → const bool by_element = false; @ graphs
ggml/routing.cpp
rows of the chosen: matrix_of(*r.device, route.sorted, k, rows) → matrix_of(*r.device, route.sorted, n, rows) @ graphs
operands of a sum: {of[0].at, of[1].at, → {of[1].at, of[0].at, @ graphs
the last node of a router: r.take(route.result); → ; @ fused
what a sum ends with: r.take(made.y); → ; @ fused
ggml/recording.cpp
int8 of another tensor: begin == begin_of(t) && → true && @ graphs
int8 that is overwritten: x.begin < end && begin < x.end; → false; @ graphs
the bytes of a view: ggml_nbytes(b) && → 0 && @ graphs
what ZINC_ATTN_FUSE says: !names || std::strstr → !names || !std::strstr @ fused
graph/recorder.cpp
a dispatch after what it reads: std::max(level, r->level + 1); → std::max(level, r->level); @ experts
overlapping ranges: r->begin < place.offset + place.size && → r->begin == place.offset && @ graphs
a set of other places: command.place, bytes) != 0 → command.place, 8) != 0 @ graphs
ggml/fusions.cpp
descending indices: op_params[0] != GGML_SORT_ORDER_DESC → op_params[0] > GGML_SORT_ORDER_DESC @ graphs
a node in place: is_view(node) || is_hidden(node->src[0]) → true @ graphs
an output that is read: node->flags & GGML_TENSOR_FLAG_OUTPUT || → false || @ graphs
other users: ggml_node_get_use_count(graph_, i) != uses → ggml_node_get_use_count(graph_, i) < uses @ graphs
users of what is hidden: if (!is_hidden(node, uses)) return false; → if (!is_hidden(node, uses)) break; @ graphs
another shape that is read: user->op == GGML_OP_RESHAPE && → user->op == GGML_OP_VIEW && @ graphs
the most of a sum: route->most = number_of(clamp, 1); → route->most = number_of(clamp, 0); @ graphs
near products: at_ + NEAR) → at_ + NEAR / 64) @ fused
the first indices: !order->view_offs && → true && @ graphs
a window that is written: overlap(other, node->src[j]) || overlap(other, node)) → overlap(other, node)) @ graphs
a state that is written: (overlap(other, rows) || overlap(other, ids))) return → overlap(other, ids)) return @ graphs
a bias of a convolution: c.constants.biased = 1; → ; @ graphs
a copy over operands: op->src[i] && overlap(copy, op->src[i]) → false && overlap(copy, op->src[i]) @ graphs
ggml/places.cpp
what another device makes: if (!is_looked_up(source)) → if (is_looked_up(source)) @ places
ggml/device.cpp
rows of V: kind.latent ? 0 : kind.v.row → kind.latent ? 0 : kind.k.row @ ggml
the size of V: options.v_head_dim = kind.v_head_dim; → options.v_head_dim = kind.head_dim; @ ggml
ggml/plugin.cpp
a graph that fails: : GGML_STATUS_FAILED; → : GGML_STATUS_SUCCESS; @ ggml
"""


SLIPS = slips(TABLE)
DEFAULT = "the smallest cache", "an overlap that goes on", "rounding of q4_0"


def test_the_table_is_of_the_files():
    check_table(SLIPS, NATIVE)
    assert {slip.breaks for slip in SLIPS}.issuperset(DEFAULT) and all(slip.test in TESTS for slip in SLIPS)


@pytest.mark.parametrize("slip", [slip for slip in SLIPS if FULL or slip.breaks in DEFAULT], ids=str)
def test_a_slip_is_caught(slip, tmp_path):
    """By a failure or a crash of the test that the table names, and by no compiler."""
    shutil.copytree(NATIVE, tmp_path / "native")
    file = tmp_path / "native" / slip.file
    file.write_text(file.read_text().replace(slip.old, slip.new))
    test = f"tests/{TESTS[slip.test]}"
    path, _, name = test.partition("::")
    chosen = [test] if "[" in name else [path, "-k", name]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen]
    env = {**os.environ, "ZINC_ATTN_NATIVE": str(tmp_path / "native"), "ZINC_ATTN_TEST_FULL": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 1 or done.returncode < 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not re.search(r":\d+:\d+: error: ", done.stdout), done.stdout[-2000:]
