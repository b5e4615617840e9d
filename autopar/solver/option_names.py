"""Names of a block's options, for people."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.recompute import MenuPoint


def option_names(points: Sequence[MenuPoint], word: str | None) -> list[str]:
    """Names of options: by how much of the bytes they keep, and how much of that on the host."""
    most = max(points[0].figures.saved_bytes, 1)
    names: list[str] = []
    for at, point in enumerate(points):
        away = 100 * point.figures.host_bytes / most
        share = 100 * point.figures.saved_bytes / most + away
        if word is not None or point.offload:
            kept = word or ("keep all" if not point.groups else f"keep {share:.0f}%")
            name = f"{kept}, {away:.0f}% on the host" if point.offload else kept
            names.append(f"{kept}, {away:.3f}% on the host" if name in names else name)
            continue
        name = f"keep {share:.0f}%"
        if not point.groups:
            name = "none"
        elif at > 0 and at == len(points) - 1:
            name = "full"
        elif name in names:
            name = f"keep {share:.3f}%"
        names.append(name)
    return names
