"""The profile of this machine: measured on request, then used for every plan made here."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from cost_models.profile import Profile, load_profile, profile_cache_path, save_profile


def saved_profile() -> Profile | None:
    """The profile of this machine, if one was measured.

    Raises:
        ConfigError: The file is damaged or of another version; the text says what to do.
    """
    path = profile_cache_path()
    return load_profile(path) if path.exists() else None


def profile_machine(
    out: Path | None = None, *, budget_s: float = 30.0, only_if_missing: bool = False
) -> tuple[Path, Profile]:
    """Measure this machine's CPU as one rank sees it, with a progress bar, and keep the result.

    Args:
        out: Where to write; where plans look for it if left out.
        budget_s: Seconds after which no further point is started.
        only_if_missing: Measure nothing if there is a profile already.

    Returns:
        The file and what it holds.

    Raises:
        ConfigError: ``budget_s`` is out of range, or an existing profile is damaged.
    """
    path = out or profile_cache_path()
    if only_if_missing and path.exists():
        return path, load_profile(path)
    from cost_models.measure import measure_local_device  # torch takes seconds

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=1.0)
        profile = measure_local_device(
            budget_s, lambda what, share: bar.update(task, description=what, completed=share)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    return path, profile
