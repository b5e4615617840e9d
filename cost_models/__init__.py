"""Seconds and bytes of operators, collectives, programs and schedules. Import from its modules.

* :mod:`cost_models.base`: the :class:`CostModel` protocol that the solver sees.
* :mod:`cost_models.analytic`: the model that answers it from a cluster's figures.
* :mod:`cost_models.memory`, :mod:`cost_models.evaluate`, :mod:`cost_models.pipeline`,
  :mod:`cost_models.simulate`: bytes, whole programs, closed forms, the event simulator.
* :mod:`cost_models.memory_timeline`, :mod:`cost_models.trace`: what follows from a simulated step.
* :mod:`cost_models.profile`, :mod:`cost_models.measure`, :mod:`cost_models.local`: what this
  machine really does.
"""

from __future__ import annotations

# Two packages of other distributions could have this name; autopar checks that it found its own.
DISTRIBUTION = "autopar"
