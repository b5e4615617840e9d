"""Published training runs as typed records.

One line of a data file is one JSON object with the parts ``hardware``, ``model``, ``parallel`` and
``measured``. What a record does not say is not guessed: it is skipped with a reason. A few fields
have a documented convention (:data:`CONVENTIONS`); where it was used the record lists it under
``assumed``. Sizes are plain numbers, times seconds, memory bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from autopar.errors import ConfigError
from autopar.units import GIB, MIB
from autopar.validation.errors import SkipRecord
from autopar.validation.family import (
    KERNEL_WORDS,
    Framework,
    KernelFamily,
    family_of,
    is_known_kernel,
)
from autopar.validation.fields import Fields, shown
from autopar.validation.hardware import Stated
from cost_models.profile import without_doubles

# What is taken where a record is silent, as the report prints it.
CONVENTIONS: Mapping[str, str] = {
    "parallel.tp": "1 where only other degrees are given and they use all GPUs",
    "parallel.pp": "1",
    "parallel.dp": "GPUs over tp x pp x cp",
    "parallel.cp": "1",
    "parallel.zero_stage": "0; 2 for XLA's auto-sharding, which shards gradients and updates",
    "parallel.seq_parallel": "false; true for nanotron, whose example recipes scatter what they "
    "reduce, with gathered inputs kept (an option; memory that was printed speaks for it)",
    "parallel.recompute": "none",
    "parallel.virtual_stages": "1",
    "parallel.mbs": "batch over dp x micro-batches",
    "parallel.microbatches": "batch over dp x micro-batch size",
    "parallel.precision": "fp16 with float32 masters",
    "model.kv_heads": "as many as heads",
    "model.ffn": "four times the width (GPT)",
    "model.vocab": "51,200: GPT-2's 50,257 tokens padded as Megatron does",
    "hardware.n_gpus": "tp x pp x dp x cp",
    "measured.mem_gb": "GiB, as torch's tools print them",
}
DEFAULT_VOCAB = 51_200
# Actions (stages x micro-batches) of the warm rounds that a schedule is simulated for.
MOST_ACTIONS = 2**18
SCHEDULES = ("1f1b", "1f1b-interleaved", "gpipe")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*% of ops")


class Kind(StrEnum):
    """What a record measured."""

    STEP = "e2e_train"
    LAYER = "layer_time"
    FORMULA = "formula"


class Recompute(StrEnum):
    """What backward makes again."""

    NONE = "none"
    FULL = "full"  # whole layers, from their inputs
    CORE = "selective"  # scores, softmax and weighted sum of the values
    PER_OPERATOR = "per-op"  # everything but attention and every other matmul
    SHARE = "share"  # a share of all operators, those that keep most bytes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer's sizes, or a Wide-ResNet's where ``arch`` says so."""

    arch: str
    layers: int
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    seq: int = 0
    base_channels: int = 0
    width_factor: int = 0
    image: int = 0
    params: float = 0.0
    has_learned_positions: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the run was divided.

    ``tp``, ``dp`` and ``layer_shares`` have one entry per stage (virtual stages excluded);
    ``mbs`` is what all data ranks of a pipeline rank see per micro-batch and rank.
    """

    tp: tuple[int, ...]
    dp: tuple[int, ...]
    pp: int
    cp: int = 1
    virtual: int = 1
    layer_shares: tuple[float, ...]
    sequence_parallel: bool = False
    zero: int = 0
    recompute: Recompute = Recompute.NONE
    recompute_share: float = 1.0
    mbs: int
    gbs: int
    microbatches: int
    precision: str
    schedule: str = "1F1B"
    async_tp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured; None where it was not printed."""

    iteration_s: float | None = None
    memory_bytes: float | None = None
    stage_memory_bytes: tuple[float, ...] = ()
    layer_forward_s: float | None = None
    layer_backward_s: float | None = None
    layer_overhead: float | None = None
    formulas: Mapping[str, str] = field(default_factory=dict)

    @property
    def printed_bytes(self) -> float | None:
        """The memory that was printed, the largest where it was printed by stage."""
        if self.memory_bytes is None and self.stage_memory_bytes:
            return max(self.stage_memory_bytes)
        return self.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One published run."""

    name: str
    source: str
    kind: Kind
    status: str
    machine: Stated
    shape: Shape
    layout: Layout
    measured: Measured
    family: KernelFamily
    assumed: tuple[str, ...] = ()
    line: int = 0

    @property
    def is_oom(self) -> bool:
        """Whether the run did not fit."""
        return self.status.startswith("oom")

    @property
    def model_key(self) -> tuple[object, ...]:
        """What records of one sweep group have in common: model, devices, batch."""
        return (self.source, self.shape, self.machine.gpu, self.machine.num_gpus, self.layout.gbs)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line that was left out."""

    name: str
    source: str
    reason: str


def read_records(
    path: Path, *, source: str | None = None
) -> tuple[tuple[Record, ...], tuple[Skipped, ...]]:
    """Records of a JSON-lines file and what was left out, in the order of the file.

    Args:
        path: The file.
        source: Only records of this source (``source_id``).

    Raises:
        ConfigError: The file can't be read or no line has the source.
    """
    try:
        # not splitlines(): text within a record may hold other separators of lines
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: can't be read ({error})") from error
    found: list[Record] = []
    skipped: list[Skipped] = []
    sources: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, where = f"line {number}", "?"
        try:
            entry = json.loads(line, object_pairs_hook=without_doubles)
            if not isinstance(entry, dict):
                skipped.append(Skipped(name, where, "line is no JSON object"))
                continue
            name = str(entry.get("id", name))
            where = _source_of(entry)
            sources.add(where)
            if source is None or where == source:
                found.append(parse_record(entry, line=number))
        except json.JSONDecodeError as error:
            skipped.append(Skipped(name, where, f"line is no JSON ({error.msg})"))
        except (RecursionError, ValueError) as error:  # too deep, too many digits, a name twice
            skipped.append(Skipped(name, where, f"line is no JSON ({str(error)[:60]})"))
        except SkipRecord as reason:
            skipped.append(Skipped(name, where, str(reason)))
    if not found and not skipped and source is None:
        raise ConfigError(f"--data {path}: holds no record; write one JSON object a line")
    if source is not None and source not in sources:
        known = ", ".join(sorted(sources)) or "no source"
        raise ConfigError(f"--source {source!r}: not in {path}; it has {known}")
    if source is not None:  # a line without a source can't be told to be of another
        skipped = [s for s in skipped if s.source in (source, "?")]
    return tuple(found), tuple(skipped)


def _source_of(entry: Mapping[str, object]) -> str:
    source = entry.get("source_id")
    if not isinstance(source, str) or not source:
        raise SkipRecord("source_id is missing")
    return source


def parse_record(entry: Mapping[str, object], *, line: int = 0) -> Record:
    """One record.

    Raises:
        SkipRecord: A field is missing, has no meaning here or contradicts another.
    """
    return _Reader(entry, line).record()


class _Reader(Fields):
    """Reads one entry; notes every convention that it used."""

    def __init__(self, entry: Mapping[str, object], line: int) -> None:
        super().__init__(entry)
        self.line = line

    # -- parts -------------------------------------------------------------------------------------
    def record(self) -> Record:
        kind = self._kind()
        status = str(self.entry.get("status", ""))
        if status not in ("ok", "oom", "oom_or_failed"):
            raise SkipRecord(f"status is {status!r}; known are ok, oom and oom_or_failed")
        family = self._family(kind)
        if kind is Kind.FORMULA:
            shape, layout, machine = _nothing(self.text("hardware.gpu"))
        else:
            shape = self._shape()
            layout = self._layout(shape, kind)
            machine = self._machine(layout)
        measured = self._measured(kind, shape, layout, machine, status)
        return Record(
            name=str(self.entry.get("id", f"line {self.line}")),
            source=str(self.entry.get("source_id", "?")),
            kind=kind, status=status, machine=machine, shape=shape, layout=layout,
            measured=measured, family=family, assumed=tuple(dict.fromkeys(self.assumed)),
            line=self.line,
        )  # fmt: skip

    def _family(self, kind: Kind) -> KernelFamily:
        """What the record's words name; words that name nothing known are refused."""
        if kind is not Kind.FORMULA:
            self.given_flag("parallel.compile")
            kernel = self.value("parallel.kernel")
            if kernel is not None and not is_known_kernel(self.text("parallel.kernel")):
                raise SkipRecord(
                    f"parallel.kernel is {shown(kernel)}; known are {', '.join(KERNEL_WORDS)}"
                )
        return family_of(self.entry)

    def _kind(self) -> Kind:
        try:
            return Kind(str(self.entry.get("kind")))
        except ValueError:
            known = ", ".join(Kind)
            raise SkipRecord(f"kind is {self.entry.get('kind')!r}; known are {known}") from None

    def _shape(self) -> Shape:
        arch = self.text("model.arch")
        layers = self.whole("model.layers")
        params = (self.optional("model.params_b") or 0.0) * 1e9
        if arch == "wresnet":
            return Shape(
                arch=arch, layers=layers, base_channels=self.whole("model.base_channels"),
                width_factor=self.whole("model.width_factor"), image=self.whole("model.image"),
                params=params,
            )  # fmt: skip
        if arch not in ("gpt", "llama", "llama3"):
            raise SkipRecord(f"model.arch is {arch!r}; known are gpt, llama, llama3 and wresnet")
        hidden, heads = self.whole("model.hidden"), self.whole("model.heads")
        if hidden % heads:
            raise SkipRecord(f"model.hidden {hidden} is no multiple of model.heads {heads}")
        is_gpt = arch == "gpt"
        name = str(self.value("model.name") or "")
        return Shape(
            arch="mpt" if name.upper().startswith("MPT") else "gpt" if is_gpt else "llama",
            layers=layers, hidden=hidden, heads=heads,
            kv_heads=self.whole("model.kv_heads", heads),
            ffn=self.whole("model.ffn", 4 * hidden if is_gpt else None),
            vocab=self.whole("model.vocab", DEFAULT_VOCAB if is_gpt else None),
            seq=self.whole("model.seq"), params=params,
        )  # fmt: skip

    def _layout(self, shape: Shape, kind: Kind) -> Layout:
        pp = self.whole("parallel.pp", 1)
        cp = self.whole("parallel.cp", 1)
        virtual = self.whole("parallel.virtual_stages", 1)
        tp, dp = self._degrees(pp, cp)
        mbs, gbs, microbatches = self._batches(dp, kind)
        self._check_division(shape, tp, cp, pp * virtual * min(microbatches, 5 * pp))
        if self.given_flag("parallel.cpu_offload"):
            raise SkipRecord("parallel.cpu_offload is true, which is not predicted")
        recompute, share = self._recompute()
        precision = self._precision()
        shares = self._layer_shares(shape, pp, virtual)
        return Layout(
            tp=tp, dp=dp, pp=pp, cp=cp, virtual=virtual, layer_shares=shares,
            sequence_parallel=self.flag("parallel.seq_parallel", self._is_nanotron()),
            zero=self._zero(), recompute=recompute, recompute_share=share, mbs=mbs, gbs=gbs,
            microbatches=microbatches, precision=precision,
            schedule=self._schedule(virtual),
            async_tp=self.given_flag("parallel.async_tp"),
        )  # fmt: skip

    def _degrees(self, pp: int, cp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tp, dp = self.per_stage("parallel.tp"), self.per_stage("parallel.dp")
        count = self.value("hardware.n_gpus")
        if tp is None and dp is None and count != 1:
            raise SkipRecord("parallel.tp and parallel.dp are missing: the plan is not stated")
        if tp is None:
            self.assumed.append("parallel.tp")
            tp = (1,)
        if dp is None:
            rest, left = divmod(self.whole("hardware.n_gpus"), tp[0] * pp * cp)
            if (len(tp) > 1 or left) and self._kind() is not Kind.LAYER:
                raise SkipRecord("parallel.dp is missing and does not follow from the rest")
            self.assumed.append("parallel.dp")
            dp = (max(1, rest),)
        stretched = []
        for name, values in (("tp", tp), ("dp", dp)):
            if len(values) not in (1, pp):
                raise SkipRecord(f"parallel.{name} has {len(values)} entries for pp {pp}")
            stretched.append(values * pp if len(values) == 1 else values)
        return stretched[0], stretched[1]

    def _batches(self, dp: tuple[int, ...], kind: Kind) -> tuple[int, int, int]:
        if kind is Kind.LAYER:
            alone = self.whole("parallel.mbs")
            return alone, alone, 1
        gbs = self.optional("parallel.gbs")
        mbs = self.optional("parallel.mbs")
        count = self.optional("parallel.microbatches")
        if mbs is None and gbs is not None and count is not None:
            self.assumed.append("parallel.mbs")
            mbs = gbs / (dp[0] * count)
        if count is None and gbs is not None and mbs is not None:
            self.assumed.append("parallel.microbatches")
            count = gbs / (dp[0] * mbs)
        if mbs is None or gbs is None or count is None:
            missing = [n for n, v in (("mbs", mbs), ("gbs", gbs), ("microbatches", count)) if not v]
            raise SkipRecord(f"parallel.{missing[0]} is missing and does not follow from the rest")
        if gbs != mbs * dp[0] * count or any(n != int(n) for n in (mbs, gbs, count)):
            raise SkipRecord(
                f"parallel.gbs {gbs:g} is not dp {dp[0]} x mbs {mbs:g} x microbatches {count:g}"
            )
        if any(int(mbs) * dp[0] % d for d in dp):
            raise SkipRecord(
                f"parallel.dp {max(dp)} does not divide a micro-batch of {mbs * dp[0]:g}"
            )
        return int(mbs), int(gbs), int(count)

    def _check_division(self, shape: Shape, tp: tuple[int, ...], cp: int, actions: int) -> None:
        if shape.heads:
            for name, size in (("heads", shape.heads), ("ffn", shape.ffn)):
                if any(size % t for t in tp):
                    raise SkipRecord(f"parallel.tp {max(tp)} does not divide model.{name} {size}")
            if shape.heads % shape.kv_heads:
                raise SkipRecord(
                    f"model.heads {shape.heads} is no multiple of model.kv_heads {shape.kv_heads}"
                )
        if shape.seq % cp:
            raise SkipRecord(f"parallel.cp {cp} does not divide model.seq {shape.seq}")
        if actions > MOST_ACTIONS:
            raise SkipRecord(
                f"the pipeline has {actions} actions; at most {MOST_ACTIONS} are simulated"
            )

    def _schedule(self, virtual: int) -> str:
        """The schedule's name; the record's other fields say whether it is interleaved."""
        value = self.value("parallel.schedule")
        if value is None:
            return "1F1B"
        if not isinstance(value, str) or value.lower() not in SCHEDULES:
            raise SkipRecord(f"parallel.schedule is {value!r}; known are {', '.join(SCHEDULES)}")
        if value.lower() == "gpipe" and virtual > 1:
            raise SkipRecord(f"parallel.schedule is gpipe, with {virtual} virtual stages")
        return value

    def _recompute(self) -> tuple[Recompute, float]:
        value = self.value("parallel.recompute")
        if value is None:
            self.assumed.append("parallel.recompute")
            return Recompute.NONE, 1.0
        words = str(value).lower()
        fraction = self.optional("parallel.recompute_op_fraction")
        percent = _PERCENT.match(words)
        if percent:
            share = fraction if fraction is not None else float(percent.group(1)) / 100
            return Recompute.SHARE, min(1.0, share)
        if words in ("none", "false", "off"):
            return Recompute.NONE, 1.0
        if words in ("full", "true", "on"):
            return Recompute.FULL, 1.0
        if "per-op" in words:
            return Recompute.PER_OPERATOR, 1.0
        if words.startswith("selective"):
            return Recompute.CORE, 1.0
        raise SkipRecord(f"parallel.recompute is {value!r}, which has no known meaning")

    def _precision(self) -> str:
        value = self.value("parallel.precision")
        if value is None:
            self.assumed.append("parallel.precision")
            return "fp16"
        words = str(value).lower()
        for key in ("float8", "amp_bf16", "bf16", "fp16", "fp32", "tf32"):
            if key in words:
                return "bf16-pure" if key == "bf16" and "pure" in words else key
        raise SkipRecord(f"parallel.precision is {value!r}, which has no known meaning")

    def _zero(self) -> int:
        value = self.value("parallel.zero_stage")
        if value is None:
            self.assumed.append("parallel.zero_stage")
            source = self.entry.get("source")
            words = str(source.get("table")) if isinstance(source, Mapping) else ""
            return 2 if "auto_sharding" in words else 0
        if value not in (0, 1, 2, 3) or isinstance(value, bool):
            raise SkipRecord(f"parallel.zero_stage is {value!r}; known are 0 to 3")
        return int(str(value))

    def _layer_shares(self, shape: Shape, pp: int, virtual: int) -> tuple[float, ...]:
        """Layers of each pipeline rank; fractions where a plan cuts inside layers."""
        bounds = self.numbers("parallel.layer_split", pp + 1)
        operators = self.numbers("parallel.ops_per_stage", pp)
        if bounds:
            # entries before and after the layers: embeddings, their casts, norms and the head
            extra = bounds[-1] - shape.layers
            if bounds[0] != 0 or extra < 0 or any(a > b for a, b in pairwise(bounds)):
                raise SkipRecord(
                    f"parallel.layer_split must rise from 0 to model.layers {shape.layers} or more"
                )
            first = extra // 2
            last = first + shape.layers
            return tuple(float(max(0, min(b, last) - max(a, first))) for a, b in pairwise(bounds))
        if operators:
            total = sum(operators)
            if not total:
                raise SkipRecord("parallel.ops_per_stage holds no operator")
            return tuple(shape.layers * count / total for count in operators)
        if self._is_nanotron() and shape.arch == "llama":
            return balanced_layers(shape, pp)
        if shape.layers % (pp * virtual):
            raise SkipRecord(
                f"model.layers {shape.layers} do not divide into pp {pp} x virtual stages "
                f"{virtual}, and parallel.layer_split is missing"
            )
        return tuple(shape.layers / pp for _ in range(pp))

    def _is_nanotron(self) -> bool:
        return family_of(self.entry).framework is Framework.NANOTRON

    def _machine(self, layout: Layout) -> Stated:
        used = layout.cp * sum(t * d for t, d in zip(layout.tp, layout.dp, strict=True))
        count = self.whole("hardware.n_gpus", used)
        may_idle = self._kind() is not Kind.STEP  # where a layer alone was timed
        if count < used or (count > used and not may_idle):
            raise SkipRecord(f"hardware.n_gpus is {count}, but the degrees use {used}")
        return Stated(
            gpu=self.text("hardware.gpu"), num_gpus=count,
            per_node=None if self.value("hardware.gpus_per_node") is None
            else self.whole("hardware.gpus_per_node"),
            memory_gb=self.optional("hardware.mem_gb"),
            memory_gb_per_s=self.optional("hardware.hbm_gbs"),
            intra_gb_per_s=self.optional("hardware.intra_node_bw_gbs"),
            inter_gb_per_s=self.optional("hardware.inter_node_gbs_per_gpu"),
            network=str(self.value("hardware.inter_node") or ""),
        )  # fmt: skip

    def _measured(
        self, kind: Kind, shape: Shape, layout: Layout, machine: Stated, status: str
    ) -> Measured:
        values = self.part("measured")
        if kind is Kind.FORMULA:
            table = values.get("bytes_per_layer")
            if not isinstance(table, Mapping):
                raise SkipRecord("measured.bytes_per_layer is missing")
            return Measured(formulas={str(k): str(v) for k, v in table.items()})
        gigabytes, gibibytes = self.optional("measured.mem_gb"), self.optional("measured.mem_gib")
        memory = (
            gibibytes * GIB if gibibytes is not None
            else gigabytes * GIB if gigabytes is not None else None
        )  # fmt: skip
        stages = self.numbers("measured.stage_max_reserved_mb")
        if len(stages) > layout.pp:
            raise SkipRecord(
                f"measured.stage_max_reserved_mb has {len(stages)} entries, parallel.pp is "
                f"{layout.pp}"
            )
        if gigabytes is not None and gibibytes is None:
            self.assumed.append("measured.mem_gb")
        forward, backward = (self.optional(f"measured.layer_{name}_ms") for name in ("fwd", "bwd"))
        overhead = self.optional("measured.layer_overhead_pct")
        iteration = None if kind is Kind.LAYER else self._iteration_s(shape, layout, machine)
        if kind is Kind.STEP and status == "ok" and iteration is None:
            raise SkipRecord("measured has no iteration time and none follows from what it has")
        return Measured(
            iteration_s=iteration, memory_bytes=memory,
            stage_memory_bytes=tuple(m * float(MIB) for m in stages),
            layer_forward_s=None if forward is None else forward / 1e3,
            layer_backward_s=None if backward is None else backward / 1e3,
            layer_overhead=None if overhead is None else overhead / 100,
        )  # fmt: skip

    def _iteration_s(self, shape: Shape, layout: Layout, machine: Stated) -> float | None:
        for name in ("iter_s", "derived_iter_s"):
            if self.value(f"measured.{name}") is not None:
                return self.number(f"measured.{name}")
        convention = str(self.value("measured.flops_convention") or "")
        rate = self.optional("measured.tflops_per_gpu")
        if "F=96" in convention and rate is not None:
            flops = published_flops(shape, layout.gbs, passes=4)
            return flops / (machine.num_gpus * rate * 1e12)
        share = self.optional("measured.mfu_pct")
        peak = self.optional("hardware.peak_bf16_tflops")
        if "72BLsh^2" in convention and share is not None and peak is not None:
            flops = published_flops(shape, layout.gbs, passes=3)
            return flops / (machine.num_gpus * peak * 1e12 * share / 100)
        return None


def published_flops(shape: Shape, batch: int, *, passes: int) -> float:
    """FLOPs of a GPT iteration as papers count them, the head without recompute.

    ``24 p B s L h^2 (1 + s/6h) + 6 B s h V`` with ``p`` passes over the layers: 3 of the model, 4
    with full recompute. Source: Narayanan et al., SC21, appendix.
    """
    width, tokens = shape.hidden, batch * shape.seq
    layers = 24.0 * passes * tokens * shape.layers * width**2 * (1 + shape.seq / (6 * width))
    return layers + 6.0 * tokens * width * shape.vocab


def balanced_layers(shape: Shape, pp: int) -> tuple[float, ...]:
    """Layers of each pipeline rank where the head's weights count as a layer's do.

    A rank takes blocks until their weights exceed its share of all; the block that exceeds it is
    still its own. The embedding counts nothing. Source: nanotron, ``models/base.py``,
    ``build_model``, which takes ``4 h^2 + 3 h f`` for a layer and ``V h`` for the head.

    >>> tiny = Shape(arch="llama", layers=8, hidden=64, ffn=128, vocab=2560)
    >>> balanced_layers(tiny, 2)  # a layer has 40,960 weights, the head as many as four layers
    (7.0, 1.0)
    """
    layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn
    total = shape.layers * layer + shape.vocab * shape.hidden
    counts, rank = [0] * pp, 0
    for index in range(shape.layers):
        counts[rank] += 1
        if (index + 1) * layer * pp > total * (rank + 1) and rank < pp - 1:
            rank += 1
    return tuple(float(count) for count in counts)


def _nothing(gpu: str) -> tuple[Shape, Layout, Stated]:
    shape = Shape(arch="gpt", layers=1)
    layout = Layout(
        tp=(1,), dp=(1,), pp=1, layer_shares=(1.0,), mbs=1, gbs=1, microbatches=1, precision="fp16"
    )
    return shape, layout, Stated(gpu=gpu, num_gpus=1)


def by_source(records: Sequence[Record]) -> Iterator[tuple[str, tuple[Record, ...]]]:
    """Records of each source, in order of first appearance."""
    for source in dict.fromkeys(r.source for r in records):
        yield source, tuple(r for r in records if r.source == source)
