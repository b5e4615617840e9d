"""The measuring half of the cost models, which imports torch."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.errors import ConfigError
from cost_models.local import local_cluster
from cost_models.measure import local_gpu_cluster, measure_local_device
from cost_models.profile import PointKind, dump_profile, parse_profile
from cost_models.storage import view_strides


def test_a_short_measurement_gives_a_usable_profile():
    seen: list[float] = []
    threads = torch.get_num_threads()
    profile = measure_local_device(0.3, lambda _, share: seen.append(share))
    assert torch.get_num_threads() == threads
    assert profile.of_kind(PointKind.LAUNCH)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert parse_profile(dump_profile(profile)) == profile
    device = local_cluster(profile).devices[0]
    # any CPU of the last ten years, busy or not
    assert 1e8 < device.peak_flops_for("float32") < 1e13
    assert 1e-8 < device.launch_overhead_s < 1e-3


def test_a_measurement_needs_time():
    with pytest.raises(ConfigError, match="budget_s is 0 and num_threads 1; the first must be"):
        measure_local_device(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpus_has_no_gpu_cluster():
    assert local_gpu_cluster() is None


def _random_view(rng: random.Random) -> tuple[torch.Tensor, list[int]]:
    shape = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 4))]
    x = torch.empty(shape)
    for _ in range(rng.randint(0, 3)):
        match rng.choice(["permute", "slice", "expand", "select"]):
            case "permute":
                x = x.permute(rng.sample(range(x.dim()), x.dim()))
            case "slice":
                dim = rng.randrange(x.dim()) if x.dim() else 0
                if x.dim() and x.shape[dim] > 1:
                    x = x.narrow(dim, 0, x.shape[dim] - 1)
            case "expand":
                x = x.expand([3 if s == 1 else s for s in x.shape])
            case "select" if x.dim() > 1:
                x = x.select(rng.randrange(x.dim()), 0)
    sizes, rest = [], x.numel()
    while rest > 1:
        factors = [f for f in range(1, rest + 1) if rest % f == 0]
        sizes.append(rng.choice(factors))
        rest //= sizes[-1]
    return x, sizes or [1]


def test_strides_of_views_are_those_of_torch():
    rng = random.Random(0)
    num_views = num_copies = 0
    for _ in range(3000):
        x, sizes = _random_view(rng)
        expected: tuple[int, ...] | None
        try:
            expected = x.view(sizes).stride()
        except RuntimeError:
            expected = None
        found = view_strides(tuple(x.shape), x.stride(), sizes)
        assert found == expected, (tuple(x.shape), x.stride(), sizes)
        num_views += expected is not None
        num_copies += expected is None
    assert min(num_views, num_copies) > 100
