"""Every collective over gloo against the simulator's arithmetic, and messages in flight."""

import sys

import torch
import torch.distributed as dist

from autopar.plan.types import MeshShape
from autopar.runtime.collective_math import resolve
from autopar.runtime.distributed import Driver
from autopar.runtime.groups import create_groups
from autopar.runtime.requests import Collective, PostRecv, Send, WaitRecv, WaitSends
from tests.handmade import two_stage


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, shape, generator=random).to(dtype)


def requests_of(rank: int, count: int) -> list[Collective]:
    made: list[Collective] = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        x = tensor_of(rank, (5, 3, 4), dtype)
        for tensor in (x, x.transpose(0, 2)):
            made += [Collective("all_reduce", tensor, "tp", op=op) for op in ("sum", "max", "min")]
            for dim in range(3):
                size = tensor.shape[dim] * count - 1
                made.append(Collective("all_gather", tensor, "tp", dim=dim, out_size=size))
                made.append(Collective("reduce_scatter", tensor, "tp", op="sum", dim=dim))
                given = tensor.clone()
                made.append(
                    Collective("reduce_scatter", given, "tp", op="sum", dim=dim, is_given=True)
                )
                made += [
                    Collective("all_to_all", tensor, "tp", dim=dim, scatter_dim=to, out_size=size)
                    for to in range(3)
                    if to != dim
                ]
                made.append(
                    Collective("all_to_all", tensor, "tp", dim=dim, scatter_dim=dim,
                               out_size=tensor.shape[dim])
                )  # fmt: skip
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        made += exchanges(rank, count, dtype)
    made.append(Collective("all_reduce", tensor_of(rank, (), torch.float64), "tp", op="sum"))
    made.append(Collective("broadcast", tensor_of(rank, (3,), torch.float64), "tp", root=count - 1))
    return made


def exchanges(rank: int, count: int, dtype: torch.dtype) -> list[Collective]:
    """Rows to the ranks of their experts, two each, and back; rank 0 has none for the last one."""
    rows = [[(r + 2 * e) % 4 if (r, e) != (0, 2 * count - 1) else 0 for e in range(2 * count)]
            for r in range(count)]  # fmt: skip
    come = [row[e] for row in rows for e in (2 * rank, 2 * rank + 1)]
    splits = torch.tensor([rows[rank], come])
    room = 8 * count  # more than any rank sends or receives
    made = []
    for back in (False, True):
        tensor = tensor_of(rank, (room, 3), dtype)
        made.append(
            Collective("all_to_all_rows", tensor, "tp", out_size=room, splits=splits, is_back=back)
        )
    return made


def check_collectives(driver: Driver, rank: int, count: int) -> int:
    all_requests = [requests_of(r, count) for r in range(count)]

    def running():
        results = []
        for request in all_requests[rank]:
            before = request.tensor.clone()
            answer = yield request
            result = answer if isinstance(answer, torch.Tensor) else answer.wait()
            if request.kind != "broadcast" and not request.is_given:
                assert torch.equal(request.tensor, before), f"{request} was written to"
            results.append(result)
        return results

    results = driver.run(running())
    for number, result in enumerate(results):
        expected = resolve([requests_of(r, count)[number] for r in range(count)])[rank]
        request = all_requests[rank][number]
        assert result.dtype == expected.dtype, request
        assert torch.equal(result, expected), request
    return len(results)


def check_messages(driver: Driver, rank: int, count: int) -> None:
    peer = (rank + 1) % count
    source = (rank - 1) % count
    sizes = [200_000 if i % 3 == 0 else 5 for i in range(30)]

    def running():
        for i, size in enumerate(sizes):
            yield Send(torch.full((size,), float(100 * rank + i)), peer, str(i))
        tickets = []
        for i, size in enumerate(sizes):
            tickets.append((yield PostRecv((size,), torch.float32, source, str(i))))
        for i, ticket in enumerate(tickets):
            value = (yield WaitRecv(ticket, source, str(i))).wait()
            assert bool((value == 100 * source + i).all()), i
        yield WaitSends()

    driver.run(running())


def main() -> None:
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = MeshShape(tp=count, virtual=2)
    groups = create_groups(mesh, two_stage(MeshShape(pp=2)), "cpu")
    assert groups is not None
    driver = Driver(groups, torch.device("cpu"))
    number = check_collectives(driver, rank, count)
    check_messages(driver, rank, count)
    driver.close()
    dist.destroy_process_group()
    sys.stdout.write(f"{number} collectives agree\n")


if __name__ == "__main__":
    main()
