"""Tables and paragraphs keep to a width: they wrap, drop, split or stack, and cut no number."""

from __future__ import annotations

import pytest

from autopar.report.layout import names, numbers, paragraph, stacked, table, words


def test_a_number_stays_with_its_unit():
    assert paragraph("it takes 12.5 MiB", 13) == ["it takes", "12.5 MiB"]


def test_a_word_that_is_too_long_is_broken_after_a_dot():
    assert paragraph("model.layers.weight", 14) == ["model.layers.", "weight"]


def test_a_table_that_fits_is_drawn_as_it_is():
    columns = [*names("stage"), *numbers("bytes")]
    assert table(columns, [["0", "12 B"]], 40) == ["stage  bytes", "────────────", "0       12 B"]


def test_a_column_of_words_is_wrapped_first():
    columns = [*numbers("n"), *words("text")]
    lines = table(columns, [["12345", "some words that are too long to fit here"]], 30)
    assert lines[2:] == ["12345  some words that are too", "       long to fit here"]


def test_a_column_that_may_go_is_left_out_next():
    columns = [*names("stage"), *numbers("bytes"), *words("why", least=30, may_go=True)]
    lines = table(columns, [["0", "12 B", "because it is so, and so on and on"]], 40)
    assert lines == ["stage  bytes", "────────────", "0       12 B"]


def test_a_table_of_numbers_is_split_and_repeats_its_first_column():
    columns = [*names("stage"), *numbers(*(f"column {i}" for i in range(5)))]
    lines = table(columns, [["0", *"abcde"]], 40)
    assert [line.split("  ") for line in lines if line.startswith("stage")] == [
        ["stage", "column 0", "column 1", "column 2"],
        ["stage", "column 3", "column 4"],
    ]


def test_other_tables_are_stacked_without_their_dashes():
    columns = [*names("axis", "when"), *numbers("calls", "time"), *words("why")]
    assert stacked(columns, [["tp", "forward", "12", "-", "sums"]], 60) == [
        "tp forward: calls 12, why sums"
    ]


@pytest.mark.parametrize("width", [40, 57, 80])
def test_no_form_is_wider_than_asked(width):
    columns = [*names("stage"), *numbers("a", "b"), *words("text", "more")]
    row = ["stage 0", "123.4 MiB", "1.23 ms", "words " * 20, "y" * 100]
    assert max(map(len, table(columns, [row], width))) <= width
