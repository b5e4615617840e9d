"""Names folded into patterns."""

from __future__ import annotations

from autopar.report.fold import fold_braces, fold_ranks, fold_scopes, fold_words


def test_layers_fold_into_ranges():
    names = ["transformer.wte", *(f"transformer.h.{i}" for i in range(6)), "transformer.ln_f"]
    assert fold_scopes(names) == ("transformer.wte", "transformer.h.[0-5]", "transformer.ln_f")


def test_gaps_in_a_range_show():
    assert fold_scopes(["h.0", "h.1", "h.4"]) == ("h.[0-1,4]",)


def test_a_single_layer_keeps_its_number():
    assert fold_scopes(["h.3", "h.3"]) == ("h.3",)


def test_experts_of_different_layers_are_not_mixed():
    assert fold_scopes(["h.0.expert.0", "h.0.expert.1", "h.1.expert.0"]) == (
        "h.[0-1].expert.0",
        "h.0.expert.1",
    )


def test_names_without_numbers_stay():
    assert fold_scopes(["a", "b.c"]) == ("a", "b.c")


def test_equal_words_fold_to_a_star_and_different_ones_to_ranges():
    words = {f"h.{i}.a": "column" for i in range(4)}
    words |= {f"h.{i}.b": "row" if i < 3 else "whole" for i in range(4)}
    assert fold_words(words) == (
        ("h.*.a", 4, "column"),
        ("h.[0-2].b", 3, "row"),
        ("h.3.b", 1, "whole"),
    )


def test_ranks_fold():
    assert fold_ranks(range(4)) == "0-3"
    assert fold_ranks(()) == ""


def test_names_that_differ_in_one_of_the_last_parts_share_braces():
    assert fold_braces(["a.ln.w", "a.ln.b", "a.fc.w"]) == ("a.ln.{w,b}", "a.fc.w")
    assert fold_braces(["h.*.w", "h.*.b", "wte", "wpe"]) == ("h.*.{w,b}", "wte", "wpe")
