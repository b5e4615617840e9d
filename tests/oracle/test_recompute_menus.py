"""Menus of what a block keeps against every possible set, on small random blocks.

Figures of a set are taken from what the programs would be (the split of a stage into halves, the
bytes that they save, the liveness of both), not from the solver's own statement.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations

import pytest

from autopar.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
)
from autopar.sharding.split import Halves, assemble, split_forward_backward
from autopar.sharding.split_backward import split_backward
from autopar.solver.recompute import STEP, menu_of, recompute_menu
from autopar.solver.recompute_blocks import recompute_problem
from autopar.solver.recompute_problem import (
    UNHIDDEN,
    Figures,
    RecomputeProblem,
    figures,
    held_bytes,
    left_bytes,
)
from cost_models.liveness import liveness, saved_bytes, saved_storages
from cost_models.offload import CopyPrice
from cost_models.storage import storages

SEEDS = range(24)


@dataclass(frozen=True)
class Drawn:
    """A random block: forward values of random sizes and prices, and a backward that reads some."""

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    prices: dict[str, float]
    problem: RecomputeProblem

    def halves(self, chosen: frozenset[str]) -> Halves:
        last = [n.name for n in self.nodes if n.phase is Phase.FORWARD][-1]
        grads = [n.name for n in self.nodes if n.phase is Phase.BACKWARD]
        return split_forward_backward(self.nodes, [last], grads[-2:], frozenset({"x"}), chosen)

    def held_bytes(self, chosen: frozenset[str]) -> int:
        """Bytes that pass from the first half of backward to the second."""
        halves = self.halves(chosen)
        sent, rest = [n.name for n in self.nodes if n.phase is Phase.BACKWARD][-2:]
        whole = Graph(self.inputs, self.nodes, ())
        memory, metas = storages(whole), whole.metas()
        describe = {i.name: (i.kind, i.target, i.meta) for i in self.inputs}
        describe |= {n: (InputKind.SAVED, n, metas[n]) for n in halves.saved}
        outputs = (
            Output(OutputKind.SEND, sent, Ref(sent)), Output(OutputKind.GRAD, rest, Ref(rest))
        )  # fmt: skip
        held = split_backward(assemble(halves.backward, outputs, describe)).held
        return sum(memory.bytes[s] for s in {s for name in held for s in memory.of[name]})

    def figures(self, chosen: frozenset[str]) -> tuple[int, float, int]:
        """Bytes kept, seconds of what is made again, most alive beyond what is kept."""
        halves = self.halves(chosen)
        last = [n.name for n in self.nodes if n.phase is Phase.FORWARD][-1]
        grads = [n.name for n in self.nodes if n.phase is Phase.BACKWARD]
        metas = Graph(self.inputs, self.nodes, ()).metas()
        describe = {i.name: (i.kind, i.target, i.meta) for i in self.inputs}
        sends = (Output(OutputKind.SEND, last, Ref(last)),)
        keeps = tuple(Output(OutputKind.SAVED, n, Ref(n)) for n in halves.saved)
        forward = assemble(halves.forward, (*sends, *keeps), describe)
        for name in halves.saved:
            describe[name] = (InputKind.SAVED, name, metas[name])
        outputs = tuple(Output(OutputKind.GRAD, g, Ref(g)) for g in grads[-2:])
        backward = assemble(halves.backward, outputs, describe)
        groups = {n: keys[0] for n, keys in saved_storages(forward).items() if keys}
        peak = max(
            liveness(forward, held_when_made=True).peak_bytes,
            liveness(backward, freed_inputs=(InputKind.SAVED,), input_groups=groups).peak_bytes,
        )
        # what only backward needs is made there in any case
        again = set(halves.recomputed) - set(self.halves(frozenset()).recomputed)
        extra_s = sum(self.prices[n] for n in again)
        return saved_bytes(forward), extra_s, peak


def drawn(seed: int) -> Drawn:
    """A block of seven to nine forward operators, some of them views."""
    rng = random.Random(seed)
    inputs = (
        Input("x", InputKind.RECV, "x", TensorMeta((rng.randint(4, 30),), "float32")),
        Input("w", InputKind.PARAM, "w", TensorMeta((16,), "float32")),
        Input("dy", InputKind.RECV, "dy", TensorMeta((8,), "float32")),
    )
    nodes: list[Node] = []
    values = ["x"]
    metas = {i.name: i.meta for i in inputs}
    for index in range(rng.randint(7, 9)):
        name = f"f{index}"
        if rng.random() < 0.2:
            source = values[-1]
            op, args, meta = "aten.view.default", (Ref(source), (-1,)), metas[source]
        else:
            count = min(len(values), rng.choice([1, 1, 2]))
            op = "aten.mm.default"
            args = (*map(Ref, rng.sample(values[-4:], min(count, len(values[-4:])))), Ref("w"))
            meta = TensorMeta((rng.randint(2, 40),), "float32")
        # an operator of the graph may have several local ones, one after another
        follows = op == "aten.mm.default" and nodes and rng.random() < 0.2
        origin = nodes[-1].origin if follows else name
        nodes.append(Node(name, op, args, meta, origin=origin))
        metas[name] = meta
        values.append(name)
    gradient = "dy"
    for index in range(rng.randint(3, 5)):
        name = f"b{index}"
        reads = rng.sample(values[:-1], min(len(values) - 1, rng.choice([1, 2, 2])))
        meta = TensorMeta((rng.randint(2, 20),), "float32")
        args = (Ref(gradient), *map(Ref, reads))
        nodes.append(Node(name, "aten.mm.default", args, meta, phase=Phase.BACKWARD, origin=name))
        gradient = name
    prices = {n.name: rng.randint(1, 60) * 1e-3 for n in nodes}
    grads = [n.name for n in nodes if n.phase is Phase.BACKWARD]
    problem = recompute_problem(
        nodes, inputs, forward_roots=[values[-1]], backward_roots=grads[-2:],
        sent_roots=[grads[-2]], received=["x"],
        may={n.origin for n in nodes}, elsewhere=lambda _: False,
        op_s=lambda node, _: prices[node.name],
    )  # fmt: skip
    return Drawn(tuple(nodes), inputs, prices, problem)


def every_set(block: Drawn) -> dict[frozenset[str], tuple[int, float, int]]:
    names = [group[0] for group in block.problem.groups]
    return {
        frozenset(chosen): block.figures(frozenset(chosen))
        for count in range(len(names) + 1)
        for chosen in combinations(names, count)
    }


def front(found: dict[frozenset[str], tuple[int, float, int]]) -> list[tuple[int, float]]:
    """Pairs of bytes and seconds that no set improves on, the fastest first."""
    result: list[tuple[int, float]] = []
    for size, time_s in sorted({(b, round(s, 9)) for b, s, _ in found.values()}):
        if not result or time_s < result[-1][1]:
            result.append((size, time_s))
    return result[::-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_large_menu_is_the_whole_front(seed: int):
    block = drawn(seed)
    found = every_set(block)
    menu = recompute_menu(block.problem, size=200)
    have = [(p.figures.saved_bytes, round(p.figures.extra_s, 9)) for p in menu]
    assert have == front(found)
    for point in menu:
        size, time_s, peak = found[frozenset(point.groups)]
        assert point.figures.saved_bytes == size
        assert point.figures.extra_s == pytest.approx(time_s, abs=1e-12)
        assert point.figures.transient_bytes == peak
        assert point.gap_s == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_menu_has_both_ends_and_only_points_of_the_front(seed: int):
    block = drawn(seed)
    best = front(every_set(block))
    menu = recompute_menu(block.problem, size=3)
    have = [(p.figures.saved_bytes, round(p.figures.extra_s, 9)) for p in menu]
    assert have[0] == best[0]
    assert have[-1] == best[-1]
    assert set(have) <= set(best)
    assert len(have) == min(3, len(best))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_menu_of_given_sets_has_those_that_are_worth_it(seed: int):
    block = drawn(seed)
    exact = recompute_menu(block.problem, size=200)
    sets = [p.figures.remade for p in exact]
    again = menu_of(block.problem, sets[::-1], size=200)
    assert [p.figures for p in again] == [p.figures for p in exact]
    found = every_set(block)
    for point in menu_of(block.problem, sets[1::2]):
        size, time_s, _ = found[frozenset(point.groups)]
        assert (point.figures.saved_bytes, point.figures.extra_s) == (size, pytest.approx(time_s))


def test_figures_of_any_set_are_those_of_its_programs():
    rng = random.Random(5)
    for seed in SEEDS:
        block = drawn(seed)
        numbers = {group[0]: i for i, group in enumerate(block.problem.groups)}
        for _ in range(20):
            chosen = frozenset(n for n in numbers if rng.random() < 0.5)
            size, time_s, peak = block.figures(chosen)
            have = figures(block.problem, [numbers[n] for n in chosen])
            assert (have.saved_bytes, have.transient_bytes) == (size, peak)
            assert have.extra_s == pytest.approx(time_s, abs=1e-12)
            # what is not needed again changes nothing
            again = block.figures(frozenset(n for n in chosen if numbers[n] in have.remade))
            assert again == pytest.approx((size, time_s, peak))


def test_bytes_held_between_the_halves_of_backward_are_those_of_its_programs():
    rng = random.Random(6)
    found = set()
    for seed in SEEDS:
        block = drawn(seed)
        numbers = {group[0]: i for i, group in enumerate(block.problem.groups)}
        for _ in range(20):
            chosen = frozenset(n for n in numbers if rng.random() < 0.5)
            want = block.held_bytes(chosen)
            found.add((seed, want))
            assert held_bytes(block.problem, [numbers[n] for n in chosen]) == want
    assert len(found) > len(SEEDS)  # what is made again matters


def test_bytes_that_a_backward_leaves_are_those_of_what_it_makes_for_no_other_block():
    for seed in SEEDS:
        block = drawn(seed)
        whole = Graph(block.inputs, block.nodes, ())
        memory = storages(whole)
        sent, rest = [n.name for n in block.nodes if n.phase is Phase.BACKWARD][-2:]
        left = set(memory.of[rest]) - set(memory.of[sent])
        assert left_bytes(block.problem) == sum(memory.bytes[s] for s in left) > 0


# -- values in host memory ---------------------------------------------------------------------
def with_host(block: Drawn, seed: int) -> RecomputeProblem:
    """The block's problem with a link to the host that hides some of its copies."""
    rng = random.Random(seed)
    ops = block.problem.ops
    names = [n.origin for n in block.nodes]
    units: dict[str, int] = {}
    unit_of = tuple(
        units.setdefault(names[i], len(units)) if not op.is_backward and op.makes else -1
        for i, op in enumerate(ops)
    )
    size = sum(block.problem.storage_bytes)
    return replace(
        block.problem, units=tuple(units), unit_of=unit_of,
        copy=CopyPrice(s_per_byte=rng.choice([0.1, 0.5]) / size, start_s=1e-3),
        beside_s=(rng.choice([0.0, 0.05]), rng.choice([0.03, 0.1])),
    )  # fmt: skip


def every_pair(problem: RecomputeProblem) -> list[Figures]:
    """Figures of all sets of what is made again and what is in host memory."""
    groups, units = range(len(problem.groups)), range(len(problem.units))
    found: dict[object, Figures] = {}
    for count in range(len(groups) + 1):
        for remade in combinations(groups, count):
            known = figures(problem, remade)
            if known.remade != frozenset(remade):
                continue  # another set without what changes nothing
            for away in range(len(units) + 1):
                for chosen in combinations(units, away):
                    have = figures(problem, remade, chosen)
                    found[have.remade, have.offloaded] = have
    return list(found.values())


@pytest.mark.parametrize("seed", range(6))
def test_a_large_menu_with_host_memory_is_the_whole_front(seed: int):
    problem = with_host(drawn(seed), seed)
    have = [(p.figures.saved_bytes, p.figures.total_s) for p in recompute_menu(problem, size=200)]
    every = sorted((f.saved_bytes, f.total_s) for f in every_pair(problem))
    for size, time_s in have[1:]:  # the first one copies nothing
        best_s = min(t for b, t in every if b <= size)
        assert time_s <= best_s + 1e-6 * max(t for _, t in every)
    assert have == sorted(have, key=lambda p: -p[0])
    least = min(size for size, _ in every)
    assert have[-1][0] <= least + STEP * have[0][0] + 1
    # something is in host memory, and that is faster than making all of it again
    point = min(recompute_menu(problem, size=200), key=lambda p: p.figures.saved_bytes)
    assert point.offload


def test_copies_beside_a_long_block_cost_little_and_short_ones_are_waited_for():
    problem = with_host(drawn(1), 1)
    every = range(len(problem.units))
    plain, hidden = figures(problem, ()), figures(replace(problem, beside_s=(9.0, 9.0)), (), every)
    copy_s = hidden.host_bytes * problem.copy.s_per_byte + len(problem.units) * 1e-3
    assert hidden.late_s == pytest.approx((UNHIDDEN * copy_s,) * 2, rel=0.2)
    assert hidden.saved_bytes + hidden.host_bytes == plain.saved_bytes
    bare = figures(replace(problem, beside_s=(0.0, 0.0)), (), every)
    assert bare.late_s[0] == bare.late_s[1] > bare.host_bytes * problem.copy.s_per_byte
    more = bare.transient_bytes - plain.transient_bytes
    assert bare.host_bytes <= more <= 2 * bare.host_bytes


def test_what_is_made_again_may_be_fixed():
    problem = with_host(drawn(2), 2)
    menu = recompute_menu(problem, size=200, remade=(0,))
    wanted = figures(problem, (0,)).remade
    assert {p.figures.remade for p in menu} == {wanted}
    assert len(menu) > 1
