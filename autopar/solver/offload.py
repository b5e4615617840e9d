"""The optimizer's state on the devices or in host memory, where the user allows either.

All of it is in one place. Both are searched, so that the plan is the faster of two and its bound
the lower of two; where nothing fits with the state on the devices, host memory is the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints
from autopar.units import format_time


def either_place(
    run: Callable[[], tuple[Plan, object]], ask: Callable[[Constraints], Plan], wish: Constraints
) -> Plan:
    """The better plan of two.

    Args:
        run: Searches with the state on the devices.
        ask: Searches under other constraints.
        wish: The user's, which allow both.

    Raises:
        InfeasibleError: Nothing fits in either way.
    """
    there = replace(wish, offload="optimizer")
    try:
        plan, _ = run()
    except InfeasibleError:
        return _in_host_memory(ask(there), "with it on the devices nothing fits")
    try:
        other = ask(there)
    except InfeasibleError:
        return plan
    bound_s = min(plan.bound_s, other.bound_s)
    if other.time_s >= plan.time_s:
        return replace(plan, bound_s=bound_s)
    why = f"with it on the devices a step takes {format_time(plan.time_s)}"
    return replace(_in_host_memory(other, why), bound_s=bound_s)


def _in_host_memory(plan: Plan, why: str) -> Plan:
    given = tuple(
        replace(item, value="allowed") if item.name == "offload" else item
        for item in plan.constraints
    )
    note = f"the optimizer's state is kept in host memory: {why}"
    return replace(plan, constraints=given, assumptions=(*plan.assumptions, note))
