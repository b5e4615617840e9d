"""Code that decides by values is refused with its own line; what a plan can hold works as in eager.

Errors are compared with the text of this file, so that a wrong line is found.
"""

from __future__ import annotations

import copy
import enum
import linecache
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own habit

import autopar
from autopar.errors import CaptureError, ConfigError, InputError
from tests.cases.eager_parity import check, found_in, problem_for, reference_of, step_of
from tests.zoo import build

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 8, (4, 4), generator=torch.Generator().manual_seed(2))


class Two(nn.Module):
    """Two layers to choose from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)


class BranchOnValues(Two):
    def forward(self, x):
        if x.sum() > 0:  # the culprit
            return self.a(x).sum()
        return self.b(x).sum()


class SizeFromValues(Two):
    def forward(self, x):
        n = (x > 0).any(1).sum().item()  # the culprit
        return self.a(x)[:n].sum()


class SanityCheck(Two):
    def forward(self, x):
        if x.max() >= 100:  # the culprit
            raise ValueError("out of range")
        return self.a(x).sum()


class Assertion(Two):
    def forward(self, x):
        assert x.abs().max() < 100, "out of range"  # the culprit
        return self.a(x).sum()


class LoopOnValues(Two):
    def forward(self, x):
        while x.norm() > 1:  # the culprit
            x = x / 2
        return self.a(x).sum()


class Listed(Two):
    def forward(self, x):
        scale = x.tolist()[0][0]  # the culprit
        return self.a(x).sum() * scale


class Selected(Two):
    def forward(self, x):
        rows = x[x.sum(1) > 0]  # the culprit
        return self.a(rows).sum()


class Helped(Two):
    def forward(self, x):
        return self.a(self.chosen(x)).sum()

    def chosen(self, x):
        return x if bool((x > 0).all()) else -x  # the culprit


BY_VALUE = (
    BranchOnValues, SizeFromValues, SanityCheck, Assertion, LoopOnValues, Listed, Selected, Helped,
)  # fmt: skip


def line_of(kind: type) -> tuple[int, str]:
    """Number and text of the line in ``kind`` that is marked."""
    start = kind.forward.__code__.co_firstlineno
    for number in range(start, start + 12):
        line = linecache.getline(__file__, number)
        if line.rstrip().endswith("# the culprit"):
            return number, line.strip()
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", BY_VALUE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("devices", [1, "2:cpu"])
def test_a_decision_by_value_is_refused_at_compile_with_its_line_and_ways_out(kind, devices):
    number, line = line_of(kind)
    with pytest.raises(CaptureError) as caught:
        autopar.compile(kind(), devices, X)
    text = str(caught.value)
    assert f"{kind.__name__}.forward can't be captured: it decides by the value" in text
    assert f"test_tracing_capture.py:{number} in " in text
    assert f"`{line}`" in text
    for way in ("torch.where", "from sizes", "the config", "move it out of the model"):
        assert way in text


def test_a_conditional_of_torch_is_refused_by_name():
    class Conditional(Two):
        def forward(self, x):
            return torch.cond(x.sum() > 0, self.a, self.b, (x,)).sum()

    with pytest.raises(CaptureError, match=r"(?s)torch.cond.*in forward: `return torch.cond"):
        autopar.compile(Conditional(), 1, X)


class Mode(enum.Enum):
    """An argument that is no tensor."""

    PLAIN = 1
    SQUARED = 2


class Static(Two):
    """Branches on Python values, sizes and attributes."""

    bounded = True

    def forward(self, x, *, double=False, mode=Mode.PLAIN, rows=slice(None)):
        y = self.a(x[rows])
        if double:
            y = y * 2
        if x.shape[0] > 2:
            y = y + 1
        if self.bounded:
            y = y.tanh()
        if mode is Mode.SQUARED:
            y = y**2
        return y.sum()


def test_branches_on_python_values_sizes_and_attributes_follow_each_call():
    model = Static()
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, X)
    for call in (
        {"double": True}, {"mode": Mode.SQUARED}, {"rows": slice(0, 2)}, {},
        {"double": True, "mode": Mode.SQUARED}, {"mode": Mode.PLAIN},
    ):  # fmt: skip
        for x in (X, X[:2]):
            torch.testing.assert_close(model(x, **call), twin(x, **call))


class Nested(Two):
    """One dict with everything in it, and an argument by keyword alone."""

    def forward(self, batch, *, scale=1.0):
        y = self.a(batch["x"]) * batch["mask"][:, None]
        y = y + self.b(batch["extra"]["pos"][0]) * scale
        return {"loss": y.pow(2).mean(), "nest": {"y": y, "none": None, "pair": (y, 1)}}


BATCH = {"x": X, "mask": torch.ones(4), "extra": {"pos": [2 * X]}}


def test_nested_arguments_equal_eager_under_every_cut():
    model = Nested()
    _, problem = problem_for(model, {"batch": BATCH, "scale": 0.5})
    for degrees in ({"dp": 2}, {"tp": 2}, {"pp": 2, "num_microbatches": 2}):
        check(found_in(step_of(problem, **degrees)), reference_of(problem))


def test_nested_arguments_and_results_keep_their_form():
    model = Nested()
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, {"batch": BATCH}, outputs=["nest.y"])
    found, wanted = model(batch=BATCH, scale=2.0), twin(batch=BATCH, scale=2.0)
    torch.testing.assert_close(found["loss"], wanted["loss"])
    torch.testing.assert_close(found["nest"]["y"], wanted["nest"]["y"])
    assert found["nest"]["none"] is None
    assert found["nest"]["pair"][1] == 1
    with pytest.raises(ConfigError, match=r"pass outputs=\['nest.pair.0'\]"):
        found["nest"]["pair"][0].sum()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"extra": {"pos": [torch.ones(4, 5)]}}, r"'batch.extra.pos.0' \[4, 5\] instead of"),
        ({"extra": {"pos": [torch.ones(4)]}}, r"'batch.extra.pos.0' is float32\[4\] with 1 dims"),
        ({"mask": torch.ones(4).long()}, "'batch.mask' is int64.*cast it to torch.float32"),
        ({"extra": {"pos": []}}, "no 'batch.extra.pos.0'"),
    ],
)
def test_a_wrong_entry_of_a_nested_argument_is_named_by_its_path(change, text):
    model = autopar.compile(Nested(), 1, {"batch": BATCH})
    with pytest.raises(InputError, match=text):
        model(batch={**BATCH, **change})
    model(batch=BATCH)["loss"].backward()


# -- objects that can't be taken apart ------------------------------------------------------------


class Cache:
    """Keys and values of a generation, as a plain Python class."""

    def __init__(self, *keys: torch.Tensor) -> None:
        self.keys = list(keys)


class Cached(Two):
    """Gives its cache unless told not to."""

    def forward(self, x, past=None, use_cache=True):
        y = self.a(x) if past is None else self.a(x) + past.keys[0]
        cache = Cache(y) if use_cache else None
        return y.pow(2).mean(), y, cache


def test_a_cache_in_the_result_is_left_out_and_named_when_it_is_used():
    model = Cached()
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, {"x": X})
    loss, _, cache = model(x=X)
    torch.testing.assert_close(loss, twin(x=X)[0])
    text = r"output '2' is a Cache, which can't be taken apart.*\(a cache: use_cache=False\)"
    with pytest.raises(ConfigError, match=text):
        _ = cache.keys
    model.eval()
    with torch.no_grad():
        _, y, cache = model(x=X)
    torch.testing.assert_close(y, twin(x=X)[1])
    with pytest.raises(ConfigError, match=text):
        _ = cache.keys
    assert model(x=X, use_cache=False)[2] is None


def test_a_model_output_with_a_cache_keeps_its_own_class_in_evaluation():
    model, batch = build("gpt2")
    twin = copy.deepcopy(model)
    model = autopar.compile(model.eval(), 1, batch)
    with torch.no_grad():
        found, wanted = model(**batch), twin.eval()(**batch)
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.logits, wanted.logits)
    with pytest.raises(ConfigError, match="is a DynamicCache, which can't be taken apart"):
        found.past_key_values.get_seq_length()


def test_a_cache_among_the_arguments_is_refused_and_not_baked_in():
    text = "argument 'past' is a Cache, which can't be taken apart.*or pass use_cache=False"
    with pytest.raises(ConfigError, match=text):
        autopar.compile(Cached(), 1, {"x": X, "past": Cache(torch.ones(4, 8))})
    model = autopar.compile(Cached(), 1, {"x": X})
    with pytest.raises(ConfigError, match=text):
        model(x=X, past=Cache(torch.ones(4, 8)))


def test_a_result_without_a_tensor_names_its_class():
    class Wrapped(Two):
        def forward(self, x):
            return Cache(self.a(x).sum())

    with pytest.raises(CaptureError, match="Wrapped.forward gives no tensor but a Cache; return"):
        autopar.compile(Wrapped(), 1, X)


# -- what is valid beside a whole step ------------------------------------------------------------


def test_a_forward_alone_and_a_backward_without_a_step_are_valid_uses():
    class Plain(Two):
        def forward(self, x):
            return self.a(x) * self.b(x)

    model = Plain()
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, X)
    torch.testing.assert_close(model(X), twin(X))
    for _ in range(2):  # accumulated
        for each in (model, twin):
            each(X).sum().backward()
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    for each in (model, twin):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    torch.testing.assert_close(model(X), twin(X))


def test_a_hook_that_a_forward_registers_once_is_registered_by_each_trace():
    class Observed(Two):
        """Collects what its layer gives by a hook that the first call installs."""

        hooked = False

        def forward(self, x):
            seen = []
            self.seen = seen
            if not self.hooked:
                self.a.register_forward_hook(lambda _, __, y: self.seen.append(y))
                self.hooked = True
            loss = F.relu(self.a(x)).sum()
            return {"loss": loss, "seen": tuple(seen)}

    model = Observed()
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, X, outputs=["seen.0"])
    assert not model.hooked
    assert len(model.a._forward_hooks) == 0
    found, wanted = model(X), twin(X)
    assert len(found["seen"]) == 1
    torch.testing.assert_close(found["seen"][0], wanted["seen"][0])


def test_the_message_of_a_model_is_kept():
    class Wrong(Two):
        def forward(self, x):
            raise ValueError("no such thing")

    with pytest.raises(CaptureError, match=re.escape("Wrong.forward raised ValueError: no such")):
        autopar.compile(Wrong(), 1, X)
