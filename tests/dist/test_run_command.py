"""``autopar run`` starts the ranks of a plan on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.spawn import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow]
MODEL = """
import torch
def build():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return Sum(net), {"x": torch.randn(8, 16)}
class Sum(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, x):
        return self.net(x).square().sum()
"""


def autopar(*words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", *words, "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_ranks_lose_what_one_loses(tmp_path):
    script = tmp_path / "net.py"
    script.write_text(MODEL)
    losses = []
    for count in ("1", "2"):
        plan = tmp_path / f"{count}.json"
        made = autopar("plan", f"{script}:build", "--devices", f"{count}:cpu", "--dp", count,
                       "-o", str(plan))  # fmt: skip
        assert made["num_ranks"] == int(count)
        told = autopar("run", f"{script}:build", str(plan), "--steps", "2", "--lr", "0.01")
        steps = told["steps"]
        assert isinstance(steps, list)
        losses.append([step["loss"] for step in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][1] < losses[0][0]
