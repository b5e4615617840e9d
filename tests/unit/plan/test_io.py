"""The JSON form of a plan: round trips, and what it says about files that are not whole."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from autopar.errors import PlanError
from autopar.plan.io import load_plan, plan_from_json, plan_hash, plan_to_json, save_plan
from autopar.plan.types import StagePlacement


def edited(plan, change):
    data = json.loads(plan_to_json(plan))
    change(data)
    return json.dumps(data)


def test_plan_to_json_and_back_is_the_identity(example_plan):
    assert plan_from_json(plan_to_json(example_plan)) == example_plan


def test_saved_plan_loads_as_the_same_value(example_plan, tmp_path):
    save_plan(example_plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == example_plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]  # no scratch file stays


def test_the_text_is_strict_json(example_plan):
    # json.loads would take Infinity, other readers would not
    assert "Infinity" not in plan_to_json(example_plan)


def test_equal_plans_have_equal_hashes_whatever_the_order_of_their_tables(example_plan):
    splits = {
        axis: dict(reversed(table.items()))
        for axis, table in reversed(list(example_plan.splits.items()))
    }
    other = replace(example_plan, splits=splits)
    assert plan_hash(other) == plan_hash(example_plan)
    assert len(plan_hash(example_plan)) == 64


def test_the_hash_changes_with_any_content(example_plan):
    splits = {**example_plan.splits, "tp": {**example_plan.splits["tp"], "mm_3": "R R -> R"}}
    others = [
        replace(example_plan, num_microbatches=5),
        replace(example_plan, splits=splits),
        replace(example_plan, time_s=0.020000000000000004),
        replace(example_plan, provenance={"torch": "2.14.0"}),
    ]
    assert len({plan_hash(p) for p in [example_plan, *others]}) == 5


def test_a_big_plan_stays_small(example_plan):
    names = {f"mm_{i}": "R S(1) -> S(1) | n" for i in range(10_000)}
    text = plan_to_json(replace(example_plan, splits={"tp": names}))
    assert len(text) < 25 * len(names)
    assert text.count("R S(1)") == 1


def test_a_file_that_was_cut_short_is_named(example_plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(example_plan)[:500])
    with pytest.raises(PlanError, match=r"plan\.json is not whole JSON .*cut short or damaged"):
        load_plan(path)


def test_a_file_of_something_else_is_named(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}')
    with pytest.raises(PlanError, match=r"other\.json is no plan: its field 'format'"):
        load_plan(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not a text in UTF-8"):
        load_plan(path)
    with pytest.raises(PlanError, match="can't read the plan .*: No such file"):
        load_plan(tmp_path / "none.json")


def test_a_plan_that_can_not_be_written_is_a_plan_error(example_plan, tmp_path):
    with pytest.raises(PlanError, match="can't write the plan to .*choose a folder that exists"):
        save_plan(example_plan, tmp_path / "missing" / "plan.json")


def test_an_edited_plan_is_refused_and_the_remedies_named(example_plan):
    text = edited(example_plan, lambda d: d["plan"].update(num_microbatches=8))
    with pytest.raises(PlanError, match=r"was edited after it was saved.*accept_edits=True"):
        plan_from_json(text, source="plan.json")
    assert plan_from_json(text, accept_edits=True).num_microbatches == 8


def test_an_unknown_version_is_named(example_plan):
    text = edited(example_plan, lambda d: d.update(version=99))
    with pytest.raises(PlanError, match="has version 99, this autopar reads version 7 and older"):
        plan_from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("strategies"), "lacks the field 'strategies'"),
        (lambda d: d["plan"].pop("cluster"), r"lacks the field plan\.cluster"),
        (
            lambda d: d["plan"]["stages"][1]["memory"].pop("grads_bytes"),
            r"lacks the field plan\.stages\[1\]\.memory\.grads_bytes",
        ),
        (lambda d: d["plan"].update(colour=1), r"has the field plan\.colour, which is unknown"),
        (
            lambda d: d["plan"]["mesh"].update(dp="two"),
            r"field plan\.mesh\.dp is 'two', not a whole number",
        ),
        (
            lambda d: d["plan"].update(schedule="zigzag"),
            "is 'zigzag', not one of 'gpipe', '1f1b', 'interleaved'",
        ),
        (lambda d: d["plan"].update(time_s=math.nan), r"plan\.time_s is nan, not a finite number"),
        (lambda d: d["plan"].update(stages={}), r"field plan\.stages is {}, not a list"),
        (lambda d: d["plan"].update(mesh=[]), r"field plan\.mesh is \[\], not a table"),
        (
            lambda d: d["plan"]["splits"]["tp"].update(w=99),
            r"field plan\.splits\.tp\.w is 99, which is no index into the 5 strategies",
        ),
        (lambda d: d["plan"].update(splits=[]), r"field plan\.splits is \[\], not a table"),
    ],
)
def test_a_damaged_field_is_named_with_the_remedy(example_plan, change, message):
    with pytest.raises(PlanError, match=message) as caught:
        plan_from_json(edited(example_plan, change), source="plan.json", accept_edits=True)
    assert str(caught.value).startswith("plan.json")
    assert "plan again" in str(caught.value)


def test_fields_that_an_older_version_has_not_yet_get_their_defaults(example_plan):
    def as_version_3(data):
        data["version"] = 3
        plan = data["plan"]
        for name in ("warmup", "rank_bytes"):
            del plan[name]
        del plan["mesh"]["placement"]
        for stage in plan["stages"]:
            del stage["time"]["weight_s"]
        for candidate in plan["runners_up"]:
            del candidate["terms"], candidate["warmup"], candidate["mesh"]["placement"]

    text = edited(example_plan, as_version_3)
    assert plan_from_json(text, accept_edits=True) == example_plan
    with pytest.raises(PlanError, match=r"lacks the field plan\.warmup"):
        plan_from_json(text.replace('"version": 3', '"version": 4'), accept_edits=True)


def test_a_file_of_version_4_has_no_levels_of_candidates_and_nothing_offloaded(example_plan):
    def as_version_4(data):
        data["version"] = 4
        del data["plan"]["offload_window_bytes"]
        del data["plan"]["offload"]
        for stage in data["plan"]["stages"]:
            del stage["offload"], stage["offload_bytes"]
            del stage["time"]["copy_s"], stage["time"]["offload_s"], stage["time"]["fetch_s"]
        for candidate in data["plan"]["runners_up"]:
            del candidate["zero_levels"]

    text = edited(example_plan, as_version_4)
    assert example_plan.runners_up
    assert plan_from_json(text, accept_edits=True) == example_plan
    with pytest.raises(PlanError, match=r"lacks the field plan\.offload"):
        plan_from_json(text.replace('"version": 4', '"version": 5'), accept_edits=True)


def test_a_file_of_version_5_has_no_saved_values_in_host_memory(example_plan):
    def as_version_5(data):
        data["version"] = 5
        del data["plan"]["offload_window_bytes"]
        for stage in data["plan"]["stages"]:
            del stage["offload"], stage["offload_bytes"]
            del stage["time"]["offload_s"], stage["time"]["fetch_s"]

    text = edited(example_plan, as_version_5)
    assert plan_from_json(text, accept_edits=True) == example_plan
    with pytest.raises(PlanError, match=r"lacks the field plan\.offload_window_bytes"):
        plan_from_json(text.replace('"version": 5', '"version": 6'), accept_edits=True)


def test_a_file_of_version_6_names_no_time_of_what_ranks_exchange_once(example_plan):
    def as_version_6(data):
        data["version"] = 6
        for stage in data["plan"]["stages"]:
            del stage["time"]["sync_s"]

    text = edited(example_plan, as_version_6)
    assert plan_from_json(text, accept_edits=True) == example_plan
    with pytest.raises(PlanError, match=r"lacks the field plan\.stages\[0\]\.time\.sync_s"):
        plan_from_json(text.replace('"version": 6', '"version": 7'), accept_edits=True)


def test_a_warm_up_and_a_placement_in_a_v_are_kept(example_plan):
    mesh = replace(example_plan.mesh, virtual=2, placement=StagePlacement.V)
    plan = replace(example_plan, mesh=mesh, warmup=(3, 1), rank_bytes=(5, 6))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_hash(plan) != plan_hash(replace(plan, warmup=None))
