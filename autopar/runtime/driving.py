"""Who answers what a step asks for: the loop that all drivers run, and drivers of one device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

import torch

from autopar.errors import PassError
from autopar.runtime.requests import Request, WaitSends

T = TypeVar("T")


class Driver(Protocol):
    """Runs a step's generators on this rank."""

    def run(self, running: Generator[Request, object, T]) -> T:
        """Run to the end; gives what the generator returns."""
        ...

    def close(self) -> None:
        """Stop what runs beside, between steps."""
        ...


def drive(running: Generator[Request, object, T], answer: Callable[[Request], object]) -> T:
    """Run a generator to its end, without gradients; gives what it returns.

    Args:
        running: What asks.
        answer: Answers one request. Neither is kept alive here while the generator goes on.
    """
    answers: list[object] = [None]  # a local name would keep a tensor alive until the next one
    with torch.no_grad():
        while True:
            try:
                request = running.send(answers.pop())
            except StopIteration as stop:
                result: T = stop.value
                return result
            answers.append(answer(request))
            del request


class LoneDriver:
    """One device: there is nobody to talk to."""

    def close(self) -> None:
        """Nothing runs beside."""

    def run(self, running: Generator[Request, object, T]) -> T:
        """Run to the end; gives what the generator returns."""
        try:
            request = next(running)
            while True:
                if not isinstance(request, WaitSends):
                    raise PassError(f"a program of one device asks for {request}")
                request = running.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result


class IdleDriver:
    """A rank beyond the mesh: it runs nothing."""

    def close(self) -> None:
        """Nothing runs beside."""

    def run(self, running: Generator[Request, object, T]) -> T:
        """Refuse."""
        raise PassError(f"an idle rank was given {running} to run")
