"""Scripts of users, for tests of commands that take one."""

from __future__ import annotations

SMALL_NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)
    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().sum()
def build(batch=8):
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(batch, 16)}
"""
