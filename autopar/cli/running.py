"""``autopar run``: a few steps under a plan, on ranks that it starts where that is possible."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from autopar.cli.models import load_model
from autopar.cli.output import REFUSED
from autopar.errors import ConfigError
from autopar.interruption import ends_at_once
from autopar.plan.io import load_plan
from autopar.report.answers import render_lines
from autopar.units import format_time
from cost_models.profiled import PROFILED

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from autopar.plan.types import Plan


def run(args: argparse.Namespace) -> int:
    """Run under torchrun or on one device; else start the ranks, or say how to."""
    plan = load_plan(args.plan, accept_edits=args.accept_edits)
    with ends_at_once():
        from autopar.api.environment import is_launched, local_machine  # torch takes seconds

    if is_launched() or plan.num_devices == 1:
        return _train(args, plan)
    count = plan.num_devices
    machine = local_machine()
    is_cpu = _is_cpu(plan)
    if not is_cpu and (machine.devices[0].kind == "cpu" or machine.num_devices < count):
        return _tell(args, plan, f"this machine has {machine.num_devices} of {machine}")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "autopar", *_own_words(args)], check=False
    )
    return min(done.returncode, REFUSED) if done.returncode >= 0 else REFUSED


def _is_cpu(plan: Plan) -> bool:
    return all(part.strip().endswith("cpu") for part in plan.cluster.split("+"))


def _own_words(args: argparse.Namespace) -> list[str]:
    """The words of this command again, for the ranks."""
    words = ["run", args.model, args.plan, "--steps", str(args.steps), "--lr", str(args.lr)]
    if args.batch is not None:
        words += ["--batch", str(args.batch)]
    flags = {"--json": args.json, "--debug": args.debug, "--accept-edits": args.accept_edits}
    return words + [flag for flag, is_set in flags.items() if is_set]


def _tell(args: argparse.Namespace, plan: Plan, reason: str) -> int:
    """Say how to start the ranks elsewhere."""
    from autopar.api.environment import launch_of
    from autopar.cluster import Cluster, parse_devices

    script = shlex.join(["-m", "autopar", *_own_words(args)])
    cluster: Cluster | None = None
    with contextlib.suppress(ConfigError):  # of a file: how many a machine has is not in the plan
        cluster = parse_devices(plan.cluster)
    launch = launch_of(cluster, script=script)
    message = f"the plan is for {plan.num_devices} devices ({plan.cluster}), {reason}"
    if args.json:
        told = {"launched": False, "reason": message, "command": launch.command}
        print(json.dumps({**told, "note": launch.note}, indent=1))
    else:
        print(render_lines(f"{message}; start its ranks with"), end="")
        print(f"  {launch.command}")  # in one piece, for a shell
        if launch.note:
            print(render_lines(launch.note), end="")
    return REFUSED


def _train(args: argparse.Namespace, plan: Plan) -> int:
    """Steps of one rank; rank 0 prints."""
    import torch

    from autopar import api
    from autopar.api.options import as_call

    model, inputs = load_model(args.model, args.batch)
    compiled = api.compile(model, inputs=inputs, plan=plan)
    device = torch.device(str(compiled.device))
    words, named = as_call(inputs, None)
    positional = [_on(value, device) for value in words]
    keywords = {name: _on(value, device) for name, value in named.items()}
    optimizer = _optimizer(plan, compiled, args.lr)
    rows: list[dict[str, float | None]] = []
    is_first = os.environ.get("RANK", "0") == "0"
    for number in range(args.steps):
        begin_s = time.perf_counter()
        loss = _step(lambda: compiled(*positional, **keywords), optimizer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin_s
        rows.append({"loss": loss, "seconds": seconds})
        if is_first and not args.json:
            shown = "" if loss is None else f"loss {loss:.6f}, "
            print(f"step {number + 1}: {shown}{format_time(seconds)}", flush=True)
    if is_first:
        if args.json:
            told = {"launched": True, "predicted_s": plan.time_s, "steps": rows}
            print(json.dumps({**told, "prices": plan.provenance.get("prices", "")}, indent=1))
        else:
            print(f"predicted: {format_time(plan.time_s)} per step{_prices_note(plan)}")
    return 0


def _prices_note(plan: Plan) -> str:
    """What to know of a prediction whose prices were not measured; "" of others."""
    is_measured = plan.provenance.get("prices", "").startswith(PROFILED)
    return "" if is_measured else ", unprofiled (see autopar profile)"


def _on(value: object, device: torch.device) -> object:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        raise ConfigError(
            "the inputs are on the meta device, which has no numbers to run on; return real ones "
            "from the function (the model may stay there)"
        )
    return value.to(device)


def _optimizer(plan: Plan, model: torch.nn.Module, rate: float) -> torch.optim.Optimizer | None:
    """The plan's optimizer; none for inference, or on a rank without parameters."""
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    if plan.mode != "train" or not parameters:
        return None
    if plan.optimizer == "adafactor":
        return torch.optim.Adafactor(parameters, lr=rate)
    if plan.optimizer.startswith("sgd"):
        momentum = 0.9 if plan.optimizer == "sgd-momentum" else 0.0
        return torch.optim.SGD(parameters, lr=rate, momentum=momentum)
    kind = torch.optim.Adam if plan.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=rate)


def _step(call: Callable[[], object], optimizer: torch.optim.Optimizer | None) -> float | None:
    """One step; its loss if the call gives one."""
    loss = _loss_of(call())
    if loss is None:
        return None
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _loss_of(result: object) -> torch.Tensor | None:
    """The loss in what a call returns: itself, ``.loss`` or ``["loss"]``."""
    import torch

    if isinstance(result, torch.Tensor):
        return result if result.dim() == 0 else None
    found = getattr(result, "loss", None)
    if found is None and isinstance(result, dict):
        found = result.get("loss")
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 else None
