"""What the plan runs on: devices, links and clusters. See the README beside this file."""

from __future__ import annotations

from autopar.cluster.device import Device, DeviceKind, EfficiencyCurve
from autopar.cluster.parse import dump_cluster, load_cluster, parse_devices
from autopar.cluster.topology import Cluster, Link, LinkKind, Machine

__all__ = [
    "Cluster",
    "Device",
    "DeviceKind",
    "EfficiencyCurve",
    "Link",
    "LinkKind",
    "Machine",
    "dump_cluster",
    "load_cluster",
    "parse_devices",
]
