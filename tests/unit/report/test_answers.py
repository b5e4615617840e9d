"""Answers keep to a width."""

from __future__ import annotations

import pytest

from autopar.report.answers import render_answer


@pytest.mark.parametrize("width", [60, 100, 160])
def test_no_line_is_longer_than_the_width(example_plan, width):
    text = render_answer(example_plan.explain().sections(), width=width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "memory of stage 0 (ranks 0-3): 3.00 GiB of 80.00 GiB" in flat


def test_a_number_stays_with_its_unit():
    text = render_answer((("title", ("word " * 11 + "12.5 GiB",)),), width=60)
    assert "12.5\n" not in text


def test_an_empty_first_section_is_the_headline():
    assert render_answer((("it is so", ()), ("why", ())), width=60) == "it is so\n"
