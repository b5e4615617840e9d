"""What one device refuses is refused when the model is captured."""

import pytest
import torch

from autopar.capture.tracing import capture
from autopar.errors import CaptureError


class Returns(torch.nn.Module):
    """Gives back what it was built with."""

    def __init__(self, value):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.value = value

    def forward(self, x):
        self.layer(x)
        return self.value


class Clamps(torch.nn.Module):
    """Writes into a weight."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        self.layer.weight.data.clamp_(-1, 1)
        return self.layer(x).sum()


def test_a_product_of_two_dtypes_is_refused_with_the_line():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"addmm.*torch.float32 and torch.float64.*cast"):
        capture(model, (torch.randn(4, 4, dtype=torch.float64),))


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "NoneType"), ("text", "str"), (object(), "obj")]
)
def test_a_result_without_tensors_is_refused(value, kind):
    with pytest.raises(CaptureError, match=rf"Returns.forward gives no tensor but a {kind}"):
        capture(Returns(value), (torch.randn(4, 4),))


def test_a_weight_changed_by_forward_is_refused_by_name():
    with pytest.raises(CaptureError, match=r"changes param model.layer.weight in place"):
        capture(Clamps(), (torch.randn(4, 4),))


def test_torch_prints_no_traceback_of_an_error_that_becomes_ours(caplog):
    with pytest.raises(CaptureError):
        capture(torch.nn.Linear(4, 4), (torch.randn(4, 5),))
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
