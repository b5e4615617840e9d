"""The only list of passes, and its runner.

Emission, then the passes in order; after each one the verifier runs and names the culprit. Nothing
in the runner knows a particular pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import fx

from autopar.errors import PassError
from autopar.ir.graph import Graph, OutputKind
from passes.base import Pass, PassContext
from passes.dead_code import remove_dead_code
from passes.emit import emit
from passes.verify import verify

logger = logging.getLogger(__name__)

PASSES: tuple[Pass, ...] = (remove_dead_code,)


def build(ctx: PassContext, passes: Sequence[Pass] = PASSES) -> fx.GraphModule:
    """Emit the program of ``ctx`` and run the passes over it.

    Raises:
        PassError: Emission or a pass left an invalid module; the pass is named.
    """
    module = emit(ctx.source, ctx)
    verify(module, ctx)
    for number, rewrite in enumerate(passes):
        name = getattr(rewrite, "__name__", f"pass {number}")
        before = len(module.graph.nodes)
        started_s = time.perf_counter()
        result = rewrite(module, ctx)
        module = result.graph_module
        try:
            verify(module, ctx)
        except (PassError, RuntimeError) as error:
            raise PassError(f"pass {name!r} left an invalid module: {error}") from error
        logger.debug(
            "pass %s on %s: modified=%s nodes %d -> %d in %.1f ms",
            name, ctx.program, result.modified, before, len(module.graph.nodes),
            (time.perf_counter() - started_s) * 1e3,
        )  # fmt: skip
    return module


def without_outputs(graph: Graph, kinds: frozenset[OutputKind]) -> Graph:
    """The program without its outputs of some kinds; what only they needed is dead code."""
    kept = tuple(o for o in graph.outputs if o.kind not in kinds)
    return Graph(graph.inputs, graph.nodes, kept)
