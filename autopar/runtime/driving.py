"""Who answers what a step asks for, on one device."""

from __future__ import annotations

from typing import Protocol

from autopar.errors import PassError
from autopar.runtime.requests import Running, WaitSends


class Driver(Protocol):
    """Runs a step's generators on this rank."""

    def run(self, running: Running) -> object:
        """Run to the end; gives what the generator returns."""
        ...


class LoneDriver:
    """One device: there is nobody to talk to."""

    def run(self, running: Running) -> object:
        """Run to the end; gives what the generator returns."""
        try:
            request = next(running)
            while True:
                if not isinstance(request, WaitSends):
                    raise PassError(f"a program of one device asks for {request}")
                request = running.send(None)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class IdleDriver:
    """A rank beyond the mesh: it runs nothing."""

    def run(self, running: Running) -> object:
        """Refuse."""
        raise PassError(f"an idle rank was given {running} to run")
