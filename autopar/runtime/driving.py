"""Who answers what a step asks for, on one device."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

from autopar.errors import PassError
from autopar.runtime.requests import Request, WaitSends

T = TypeVar("T")


class Driver(Protocol):
    """Runs a step's generators on this rank."""

    def run(self, running: Generator[Request, object, T]) -> T:
        """Run to the end; gives what the generator returns."""
        ...


class LoneDriver:
    """One device: there is nobody to talk to."""

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

    def run(self, running: Generator[Request, object, T]) -> T:
        """Refuse."""
        raise PassError(f"an idle rank was given {running} to run")
