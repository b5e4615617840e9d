"""A program in double precision: what every plan and the reference are judged in."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import FLOAT_DTYPES, Arg, Dtype, Graph, Meta, TensorMeta


def promote(graph: Graph) -> Graph:
    """``graph`` with every floating-point dtype replaced by float64, complex ones by complex128.

    Inputs, results and dtype arguments change; models that compute a part in float32 compute it
    in float64. Casts that no longer change anything stay, as copies, so that operators keep their
    names and the two programs can be compared one by one.
    """
    return Graph(
        inputs=tuple(
            replace(i, meta=_promote_meta(i.meta), master="")  # type: ignore[arg-type]
            for i in graph.inputs
        ),
        nodes=tuple(
            replace(
                node,
                args=tuple(_promote_arg(a) for a in node.args),
                kwargs=tuple((k, _promote_arg(a)) for k, a in node.kwargs),
                meta=_promote_meta(node.meta),
            )
            for node in graph.nodes
        ),
        outputs=graph.outputs,
    )


def _promote_meta(meta: Meta) -> Meta:
    if isinstance(meta, TensorMeta):
        return replace(meta, dtype=_promoted(meta.dtype))
    if isinstance(meta, tuple):
        return tuple(_promote_meta(m) for m in meta)  # type: ignore[misc]
    return meta


def _promote_arg(arg: Arg) -> Arg:
    if isinstance(arg, Dtype):
        return Dtype(_promoted(arg.name))
    if isinstance(arg, tuple):
        return tuple(_promote_arg(a) for a in arg)
    return arg


def _promoted(dtype: str) -> str:
    if dtype in FLOAT_DTYPES:
        return "float64"
    return "complex128" if dtype.startswith("complex") else dtype
