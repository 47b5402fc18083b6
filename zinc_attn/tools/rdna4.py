"""The shipped kernels under RADV's compiler for RDNA4, on a machine without the card.

Mesa 25.0 offers a device 'Null hardware (RADV GFX1201)' that compiles pipelines and runs nothing. Environment
variables choose it, so the compiling happens in child processes. ``python -m zinc_attn.rdna4`` prints the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .. import limits, shapes
from ..canonical import constants
from ..errors import ArgumentError, KernelError, NoVulkanError, ZincAttnError
from ..kernels import contract as kernels
from ..runtime.device import SPIRV
from ..runtime.protocol import Vulkan, loader

FAMILIES: Final = {"gfx1201": "gfx1201", "gfx1200": "gfx1200", "gfx1100": "navi31"}  # to Mesa's name
ICD_FOLDERS: Final = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
NEEDED_MESA: Final = "RADV of Mesa 25.0 (older ones do not know the chip, newer ones compile for real cards only)"
_EXTENSIONS: Final = ("VK_KHR_pipeline_executable_properties", "VK_EXT_subgroup_size_control")
_CAPTURE: Final = 0x40 | 0x80  # VK_PIPELINE_CREATE_CAPTURE_{STATISTICS,INTERNAL_REPRESENTATIONS}_BIT_KHR

# A SIMD of these chips: 1536 registers per lane in wave32, 16 wave slots; a CU: 2 SIMDs, 64 KiB of LDS.
REGISTER_FILE, REGISTER_STEP, WAVE_SLOTS = 1536, 24, 16
LDS_PER_SIMD, LDS_STEP = 32 << 10, 1 << 10

# --- gates: what every shipped variant must keep ----------------------------------------------------------
MAX_LDS_BYTES: Final = 4096
# (kernel name prefix, head_dim up to, VGPRs up to): the first row that fits a variant holds for it, on RDNA4 only
VGPR_GATES: Final = (
    ("attend_single_", 256, 120),  # 12 waves per SIMD
    ("attend_loop_", 256, 168),  # 9
    ("attend_", 512, 192),  # 8
    ("merge", 512, 120),  # 12, of workgroups of 8
)
SHARED_GATE: Final = 240  # 6; each wave then has twice the work per byte


@dataclass(frozen=True)
class Spec:
    """One variant: a kernel with its specialisation constants. heads: 0 for the merge kernel; rows: of shared keys.

    chunks: workgroups that share a KV head; it scales the issue estimate and changes nothing else. softcap: 1 for the
    builds that cap scores.
    """

    kernel: str
    head_dim: int
    heads: int = 0
    chunks: int = 1
    softcap: int = 0
    rows: int = 1

    @property
    def constants(self) -> tuple[int, ...]:
        return (
            (
                self.head_dim,
                self.heads,
                kernels.chunks_ahead("discrete", self.head_dim),
                constants.LEAF,
                self.softcap,
                self.rows,
            )
            if self.heads
            else (self.head_dim, kernels.merge_lanes("discrete"))
        )


@dataclass(frozen=True)
class Issue:
    """Instructions a wave issues, per key of a leaf. A dual-issued pair is one ``valu``, and one ``vopd``."""

    valu: float
    vopd: float
    smem: float
    vmem: float
    lds: float
    salu: float

    @property
    def total(self) -> float:
        """Issue cycles per key, without scalar ALU work, which issues beside the vector work of other waves."""
        return self.valu + self.smem + self.vmem + self.lds


@dataclass(frozen=True)
class VariantReport:
    """What the compiler made of one variant. Sizes in bytes; ``statistics``: every number as RADV names it.

    qk, pv: the two main loops (scores, values), None where they were not recognised beyond doubt.
    """

    spec: Spec
    family: str
    wave: int
    statistics: Mapping[str, int]
    qk: Issue | None
    pv: Issue | None

    @property
    def vgprs(self) -> int:
        return self.statistics["VGPRs"]

    @property
    def sgprs(self) -> int:
        return self.statistics["SGPRs"]

    @property
    def spills(self) -> int:
        """Spilled vector and scalar registers."""
        return self.statistics["Spilled VGPRs"] + self.statistics["Spilled SGPRs"]

    @property
    def lds_bytes(self) -> int:
        return self.statistics["LDS size"]

    @property
    def waves_per_simd(self) -> int:
        """Waves that the chip's registers hold. RADV's 'Subgroups per SIMD' assumes a file of 1024."""
        return occupancy(self.vgprs)

    @property
    def waves_per_simd_lds(self) -> float:
        """Waves per SIMD that the LDS holds, on average over a CU: workgroups have one wave, those of pass 2 eight."""
        steps = -(-self.lds_bytes // LDS_STEP)
        waves = 1 if self.spec.heads else kernels.merge_lanes("discrete") // limits.WAVE
        return min(WAVE_SLOTS, waves * LDS_PER_SIMD / (steps * LDS_STEP)) if steps else WAVE_SLOTS

    @property
    def issue_per_key(self) -> float | None:
        """Issue cycles of the main loops per key and KV head, over all head chunks."""
        return None if self.qk is None or self.pv is None else self.spec.chunks * (self.qk.total + self.pv.total)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, derived numbers included."""
        derived = ("waves_per_simd", "waves_per_simd_lds", "issue_per_key")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


def occupancy(vgprs: int) -> int:
    """Resident wave32s per SIMD for a register count: registers are allocated in steps of 24."""
    return min(WAVE_SLOTS, REGISTER_FILE // (max(1, -(-vgprs // REGISTER_STEP)) * REGISTER_STEP))


def specs_for(shape: shapes.AttnShape, softcap: int = 0) -> list[Spec]:
    """Every kernel as this shape uses it: both builds of pass 1 in each dtype, and pass 2."""
    return [
        Spec(
            k.name,
            shape.head_dim,
            *((shape.heads_per_workgroup, shape.head_chunks, softcap) if "heads" in k.spec else ()),
        )
        for k in kernels.KERNELS
        if k.spec[0] == "head_dim"
    ]


def default_specs() -> list[Spec]:
    """The variants that the preset models need, and every other head_dim with groups of 4."""
    text = "16/2/256 32/4/128 32/8/128 24/4/256 64/8/64 9/3/64 32/16/256 4/1/512 4/1/80 4/1/96 4/1/112 4/1/192"
    found = [s for shape in text.split() for s in specs_for(shapes.AttnShape.parse(shape))]
    found += specs_for(shapes.AttnShape.parse("16/8/256"), softcap=1)  # Gemma 2
    shared = "8/1/128 4/1/128 3/1/64 1/1/64 2/1/128 1/1/192 4/1/256 6/1/256 8/1/256 8/1/512"  # keys that rows share
    for shape in map(shapes.AttnShape.parse, shared.split()):
        group, dim, rows = shape.group, shape.head_dim, kernels.shared_rows("discrete", shape)
        found += [Spec(k.name, dim, group * rows, rows=rows) for k in kernels.KERNELS if "heads" in k.spec and rows > 1]
    return sorted(dict.fromkeys(found), key=lambda s: [k.name for k in kernels.KERNELS].index(s.kernel))


def violations(reports: Iterable[VariantReport]) -> list[str]:
    """One sentence per broken gate."""
    found = []
    for r in reports:
        gate = next(n for p, dim, n in VGPR_GATES if r.spec.kernel.startswith(p) and r.spec.head_dim <= dim)
        gate = SHARED_GATE if r.spec.rows > 1 else gate
        for what, got, most in (
            ("spilled registers", r.spills, 0),
            ("scratch bytes", r.statistics["Scratch size"], 0),
            ("LDS bytes", r.lds_bytes, MAX_LDS_BYTES),
            ("VGPRs", r.vgprs, gate),
        ):
            if got > most and (what != "VGPRs" or r.family.startswith("gfx12")):
                found.append(f"{name(r.spec)}: {got} {what}, at most {most} allowed")
        if r.wave != limits.WAVE:
            found.append(f"{name(r.spec)}: wave{r.wave}, wave{limits.WAVE} needed")
    return found


def name(spec: Spec) -> str:
    """kernel:head_dim:heads, as --isa takes it; :chunks:softcap:rows behind it where these are not 1, 0 and 1."""
    more = (spec.chunks, spec.softcap, spec.rows) if spec.softcap or spec.rows > 1 else ()
    numbers = (spec.head_dim, spec.heads, *more)
    return ":".join(str(x) for x in (spec.kernel, *numbers) if x or more)


# --- the ISA text -----------------------------------------------------------------------------------------
_BLOCK: Final = re.compile(r"BB(\d+):?$")
_OPCODE: Final = re.compile(r"(?:^|= |\s)((?:v|s|ds|buffer|global|flat|scratch|tbuffer|image)_[a-z]\w*)")
_TARGET: Final = re.compile(r"\bBB(\d+)\b")
_WIDTH: Final = re.compile(r"_load_(?:dword(?:x(\d))?|b(\d+))$")
_FREE: Final = ("s_wait", "s_delay_alu", "s_clause", "s_nop")  # no issue slot of their own


def innermost_loops(isa: str) -> list[tuple[list[tuple[str, bool]], bool]]:
    """(instructions, straight) per innermost loop, in program order; an instruction is (opcode, dual-issued).

    A loop is what a backward branch spans. straight: it has no conditional part, so each trip runs all of it.
    """
    at = -1
    code: list[tuple[int, str, bool]] = []  # (block, opcode, dual-issued)
    jumps: list[tuple[int, int]] = []
    for line in isa.splitlines():
        text = line.split("//")[0].split(";")[0].strip()
        if label := _BLOCK.match(text):
            at = int(label[1])
        elif (found := _OPCODE.search(text)) and at >= 0:
            code.append((at, found[1], " :: " in text))
            if found[1].startswith(("s_branch", "s_cbranch")) and (target := _TARGET.search(text[found.end() :])):
                jumps.append((at, int(target[1])))
    ends: dict[int, int] = {}  # first block to last block
    for at, to in jumps:
        if to <= at:
            ends[to] = max(at, ends.get(to, at))
    inner = [(begin, end) for begin, end in sorted(ends.items()) if not any(begin < b <= end for b in ends)]
    return [
        (
            [(op, dual) for at, op, dual in code if begin <= at <= end],
            not any(begin <= at < to <= end for at, to in jumps),
        )
        for begin, end in inner
    ]


def main_loops(isa: str, head_dim: int, dtype_bytes: int) -> tuple[Issue | None, Issue | None]:
    """(score loop, value loop) of pass 1 per key.

    The score loop is the only innermost loop that loads vectors and reads no LDS (the query comes by scalar
    loads), the value loop the only one that does both. Trips per leaf follow from the bytes that one trip
    loads, which accounts for unrolling: K of a leaf is 2 keys a lane, V one slice of 64 keys.
    """
    groups: tuple[list[Issue | None], list[Issue | None]] = ([], [])
    for loop, straight in innermost_loops(isa):
        if per_trip := sum(_load_bytes(op) for op, _ in loop):
            reads_lds = any(op.startswith(("ds_read", "ds_load")) for op, _ in loop)
            keys = constants.LEAF * kernels.value_slice(head_dim) if reads_lds else 2 * head_dim
            trips_per_key = keys * dtype_bytes / per_trip / constants.LEAF
            groups[reads_lds].append(_issue(loop, trips_per_key) if straight else None)
    qk, pv = (g[0] if len(g) == 1 else None for g in groups)
    return qk, pv


def _load_bytes(opcode: str) -> int:
    """Bytes per lane of a vector memory load; 0 for anything else."""
    width = _WIDTH.search(opcode) if opcode.startswith(("buffer_", "global_")) else None
    return 0 if width is None else int(width[2]) // 8 if width[2] else 4 * int(width[1] or 1)


def _issue(loop: Sequence[tuple[str, bool]], trips_per_key: float) -> Issue:
    count = dict.fromkeys(("valu", "vopd", "smem", "vmem", "lds", "salu"), 0)
    for op, dual in loop:
        if op.startswith("v_"):
            count["valu"] += 1
            count["vopd"] += dual
        elif op.startswith("ds_"):
            count["lds"] += 1
        elif op.startswith(("s_load", "s_buffer_load")):
            count["smem"] += 1
        elif not op.startswith("s_"):
            count["vmem"] += 1
        elif not op.startswith(_FREE):
            count["salu"] += 1
    return Issue(**{kind: n * trips_per_key for kind, n in count.items()})


# --- the compiler, in child processes ---------------------------------------------------------------------
def report(specs: Sequence[Spec] | None = None, family: str = "gfx1201", spirv: Path = SPIRV) -> list[VariantReport]:
    """Compile ``specs`` (default: ``default_specs()``) from the modules in folder ``spirv``.

    NoVulkanError with the text of ``missing(family)`` where that cannot be done.
    """
    wanted = default_specs() if specs is None else list(specs)
    found: dict[Spec, VariantReport] = {}
    count = max(1, min(len(wanted), os.cpu_count() or 1))
    with ThreadPoolExecutor(count) as pool:
        shares = [wanted[i::count] for i in range(count)]
        for share, made in zip(shares, pool.map(lambda s: _child(s, family, spirv), shares), strict=True):
            for spec, one in zip(share, made, strict=True):
                found[spec] = _read(spec, family, one)
    return [found[s] for s in wanted]


def isa_text(spec: Spec, family: str = "gfx1201", spirv: Path = SPIRV) -> str:
    """The compiled program of one variant; RADV prints its own notation where LLVM does not know the chip."""
    return str(_child([spec], family, spirv)[0]["isa"])


def missing(family: str = "gfx1201") -> str | None:
    """Why nothing can be compiled for ``family`` here, in one sentence; None where it can."""
    try:
        _child([], family, SPIRV)
    except NoVulkanError as e:
        return str(e)
    return None


def _read(spec: Spec, family: str, one: Mapping[str, Any]) -> VariantReport:
    dtype_bytes = limits.DTYPE_BYTES.get(spec.kernel.rsplit("_", 1)[-1])
    loops = main_loops(one["isa"], spec.head_dim, dtype_bytes) if spec.heads and dtype_bytes else (None, None)
    return VariantReport(spec, family, int(one["wave"]), one["statistics"], *loops)


def _environment(family: str) -> Mapping[str, str]:
    if family not in FAMILIES:
        raise ArgumentError(f"family: got {family!r}, expected one of {', '.join(FAMILIES)}")
    chosen = os.environ.get("ZINC_ATTN_RADV_ICD")  # for a Mesa unpacked beside the system's
    paths = [Path(chosen)] if chosen else [p for d in ICD_FOLDERS for p in sorted(Path(d).glob("radeon_icd*.json"))]
    icd = next((str(p) for p in paths if p.is_file()), None)
    if icd is None:
        where = chosen or f"radeon_icd*.json in {', '.join(ICD_FOLDERS)}"
        raise NoVulkanError(f"there is no {where}: install mesa-vulkan-drivers with {NEEDED_MESA}")
    dropped = (
        "VK_ADD_DRIVER_FILES",
        "VK_LOADER_DRIVERS_SELECT",
        "VK_LOADER_DRIVERS_DISABLE",
        "VK_INSTANCE_LAYERS",
    )
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("RADV_")}
    # Statistics exist only for what is compiled now, so Mesa's cache on disk is off.
    return kept | {
        "RADV_FORCE_FAMILY": FAMILIES[family],
        "VK_ICD_FILENAMES": icd,
        "VK_DRIVER_FILES": icd,
        "MESA_SHADER_CACHE_DISABLE": "true",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), kept.get("PYTHONPATH")))),
    }


def _child(specs: Sequence[Spec], family: str, spirv: Path) -> list[dict[str, Any]]:
    """{"wave", "statistics", "isa"} per spec. NoVulkanError: no such compiler; KernelError: it refused."""
    declared = {k.name: k for k in kernels.KERNELS}
    jobs = []
    for spec in specs:
        if spec.kernel not in declared or len(spec.constants) != len(declared[spec.kernel].spec):
            raise ArgumentError(
                f"variant: got {name(spec)}, expected a kernel of {', '.join(declared)} with its constants"
            )
        bindings, several = len(declared[spec.kernel].bindings), not spec.heads  # pass 2: a workgroup of several waves
        decl = declared[spec.kernel]
        jobs.append([str(spirv / decl.file), bindings, several, decl.constants(spec.constants)])
    ran = subprocess.run(
        [sys.executable, "-m", "zinc_attn.tools.rdna4", "--worker"],
        input=json.dumps({"family": family, "jobs": jobs}),
        env=_environment(family),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if "conformant" not in line]
        raise NoVulkanError(f"compiling for {family} needs {NEEDED_MESA}; here: {said[-1] if said else 'it died'}")
    answer = json.loads(ran.stdout)
    if "refused" in answer:
        raise KernelError(answer["refused"])
    return list(answer["made"])


def _work() -> None:
    """The child: {"family", "jobs"} from stdin, {"made": [...]} or {"refused": why} to stdout."""
    order = json.load(sys.stdin)
    try:
        vk = loader()
        physical = vk.physical_devices(vk.create_instance()[0])[0]
        props = vk.properties(physical)[0]
        chip = vk.text(props.deviceName)
        if FAMILIES[order["family"]] not in chip.lower():  # a Mesa that ignores the forced family
            sys.exit(f"the driver offers {chip!r}")
        sizes = vk.struct("VkPhysicalDeviceSubgroupSizeControlFeatures", subgroupSizeControl=1, computeFullSubgroups=1)
        feature = vk.struct(
            "VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR", pNext=sizes, pipelineExecutableInfo=1
        )
        names = [vk.ffi.new("char[]", name.encode()) for name in _EXTENSIONS]
        priority = vk.array("float", [1.0])  # of RADV's first queue family, which can do everything
        queue = vk.struct("VkDeviceQueueCreateInfo", queueCount=1, pQueuePriorities=priority)
        create = vk.struct(
            "VkDeviceCreateInfo",
            pNext=feature,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue,
            enabledExtensionCount=len(names),
            ppEnabledExtensionNames=vk.array("char*", names),
        )
        device = vk.ffi.new("VkDevice*")
        result = vk.lib.vkCreateDevice(physical, create, vk.ffi.NULL, device)
        vk.check(result, f"a device with {', '.join(_EXTENSIONS)}")
    except ZincAttnError as e:
        sys.exit(str(e))
    try:
        answer: dict[str, Any] = {"made": [_compile(vk, device[0], *job) for job in order["jobs"]]}
    except (OSError, ZincAttnError) as e:
        answer = {"refused": str(e)}
    print(json.dumps(answer))


def _compile(
    vk: Vulkan, device: Any, path: str, bindings: int, several: bool, constants: Sequence[int]
) -> dict[str, Any]:
    """One pipeline. The child ends soon: nothing is freed.

    several: the workgroup has several waves, so wave32 is required, as the plain Vulkan runtime does; one wave gets it
    without, which is how Kompute makes it.
    """
    ffi, lib = vk.ffi, vk.lib

    def make(kind: str, info: Any) -> Any:
        made = ffi.new(f"Vk{kind}*")
        vk.check(getattr(lib, f"vkCreate{kind}")(device, info, ffi.NULL, made), f"vkCreate{kind}")
        return made[0]

    def ask(what: str, ctype: str, about: Any) -> tuple[Any, int]:
        function = lib.vkGetDeviceProcAddr(device, ffi.new("char[]", f"vkGetPipelineExecutable{what}KHR".encode()))
        function = ffi.cast(f"PFN_vkGetPipelineExecutable{what}KHR", function)
        count = ffi.new("uint32_t*")
        vk.check(function(device, about, count, ffi.NULL), what)
        items = ffi.new(f"{ctype}[]", count[0])
        for _ in range(2):  # the first call sizes the texts, the second, where there are texts, fetches them
            vk.check(function(device, about, count, items), what)
            if what != "InternalRepresentations":
                break
            for i in range(count[0]):
                texts.append(ffi.new("char[]", items[i].dataSize))
                items[i].pData = texts[-1]
        return items, int(count[0])

    texts: list[Any] = []
    each = {"descriptorType": 7, "descriptorCount": 1, "stageFlags": 0x20}  # storage buffer, compute
    table = [vk.struct("VkDescriptorSetLayoutBinding", binding=i, **each) for i in range(bindings)]
    table = vk.array("VkDescriptorSetLayoutBinding", table)
    sets = make(
        "DescriptorSetLayout",
        vk.struct("VkDescriptorSetLayoutCreateInfo", bindingCount=bindings, pBindings=table),
    )
    sets = vk.array("VkDescriptorSetLayout", [sets])
    layout = make("PipelineLayout", vk.struct("VkPipelineLayoutCreateInfo", setLayoutCount=1, pSetLayouts=sets))
    code = Path(path).read_bytes()
    words = ffi.from_buffer("uint32_t[]", code)
    module = make("ShaderModule", vk.struct("VkShaderModuleCreateInfo", codeSize=len(code), pCode=words))
    entries = [vk.struct("VkSpecializationMapEntry", constantID=i, offset=4 * i, size=4) for i in range(len(constants))]
    special = vk.struct(
        "VkSpecializationInfo",
        mapEntryCount=len(entries),
        pMapEntries=vk.array("VkSpecializationMapEntry", entries),
        dataSize=4 * len(entries),
        pData=vk.array("uint32_t", constants),
    )
    main_name = ffi.new("char[]", b"main")
    size = vk.struct("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=limits.WAVE)
    stage = vk.struct(
        "VkPipelineShaderStageCreateInfo",
        pNext=size if several else ffi.NULL,
        flags=2 * several,  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
        stage=0x20,
        module=module,
        pName=main_name,
        pSpecializationInfo=special,
    )
    create = vk.struct("VkComputePipelineCreateInfo", flags=_CAPTURE, stage=stage[0], layout=layout)
    pipeline = ffi.new("VkPipeline*")
    result = lib.vkCreateComputePipelines(device, ffi.NULL, 1, create, ffi.NULL, pipeline)
    vk.check(result, f"compiling {path} with {list(constants)}")
    about = vk.struct("VkPipelineInfoKHR", pipeline=pipeline[0])
    stages, _ = ask("Properties", "VkPipelineExecutablePropertiesKHR", about)
    about = vk.struct("VkPipelineExecutableInfoKHR", pipeline=pipeline[0])
    numbers, count = ask("Statistics", "VkPipelineExecutableStatisticKHR", about)
    kinds = "VkPipelineExecutableInternalRepresentationKHR"
    shown, forms = ask("InternalRepresentations", kinds, about)
    isa = next(texts[i] for i in range(forms) if vk.text(shown[i].name) == "Assembly")
    statistics = {vk.text(numbers[i].name): int(numbers[i].value.u64) for i in range(count)}
    return {"wave": int(stages[0].subgroupSize), "statistics": statistics, "isa": vk.text(isa)}


# --- command line -----------------------------------------------------------------------------------------
_COLUMNS: Final = (
    "kernel dim heads wave VGPR SGPR spill LDS code instr VALU VOPD VMEM SMEM latency sub/SIMD waves wavesLDS "
    "QK PV issue/key"
)


def table(reports: Sequence[VariantReport]) -> str:
    """Plain text, one line per variant.

    sub/SIMD: RADV's figure, for 1024 registers; waves: for the chip's 1536; wavesLDS: by its LDS. QK, PV and
    issue/key: issue cycles per key and KV head.
    """
    rows = [_COLUMNS.split()]
    for r in reports:
        s = r.statistics
        cells: list[Any] = [
            r.spec.kernel,
            r.spec.head_dim,
            r.spec.heads,
            r.wave,
            r.vgprs,
            r.sgprs,
            r.spills,
            r.lds_bytes,
        ]
        cells += [s.get(k, "-") for k in ("Code size", "Instructions", "VALU", "VOPD", "VMEM", "SMEM", "Latency")]
        cells += [s.get("Subgroups per SIMD", "-"), r.waves_per_simd, f"{r.waves_per_simd_lds:.1f}"]
        issue = [None if x is None else x.total * r.spec.chunks for x in (r.qk, r.pv)]
        cells += ["-" if x is None else f"{x:.0f}" for x in (*issue, r.issue_per_key)]
        rows.append([str(c) for c in cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))) for r in rows
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0: every gate holds; 3: one does not; 2: it cannot be known here."""
    parser = argparse.ArgumentParser(prog="python -m zinc_attn.rdna4", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--family", default="gfx1201", choices=FAMILIES)
    parser.add_argument("--json", action="store_true", help="every number, one object per variant")
    parser.add_argument("--isa", metavar="KERNEL:HEAD_DIM:HEADS", help="print one variant's program")
    parser.add_argument("--spirv", type=Path, default=SPIRV, help="folder of the modules (default: the shipped ones)")


def run(args: argparse.Namespace) -> int:
    """0: every gate holds; 3: one does not; 2: it cannot be known here."""
    if why := missing(args.family):
        print(why, file=sys.stderr)
        return 2
    try:
        if args.isa:
            kernel, *constants = args.isa.split(":")
            print(isa_text(Spec(kernel, *map(int, constants)), args.family, args.spirv))
            return 0
        reports = report(None, args.family, args.spirv)
    except (KernelError, TypeError, ValueError) as e:  # ArgumentError is a ValueError
        print(e, file=sys.stderr)
        return 2
    print(json.dumps([r.to_dict() for r in reports], indent=1) if args.json else table(reports))
    broken = violations(reports)
    for sentence in broken:
        print(sentence, file=sys.stderr)
    if not args.json and not broken:
        most = max(r.statistics["LDS size"] for r in reports)
        print(f"{len(reports)} variants: all wave32, no spills, LDS at most {most} bytes: every gate holds")
    return 3 if broken else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        _work()
    else:
        sys.exit(main())
