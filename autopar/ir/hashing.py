"""Hash of a program's content."""

from __future__ import annotations

from hashlib import blake2b

from autopar.ir.graph import Graph
from autopar.ir.printer import format_input, format_node, format_output


def graph_hash(graph: Graph) -> str:
    """32 hexadecimal digits that stand for everything in ``graph`` but the source lines.

    Equal programs have equal hashes on every machine and in every process.
    """
    digest = blake2b(digest_size=16)
    for entry in graph.inputs:
        digest.update(f"{format_input(entry)}\n".encode())
    for node in graph.nodes:
        notes = f"{node.phase}|{node.twin}|{node.scope}|{node.origin}"
        digest.update(f"{format_node(node)}|{notes}\n".encode())
    for output in graph.outputs:
        digest.update(f"{format_output(output)}\n".encode())
    return digest.hexdigest()
