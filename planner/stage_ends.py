"""What stage 0 of a pipeline does before its first forward and after its last backward: nothing hides it, it adds to the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.prices import Floats, Prices, UnitPrices
from planner.sites import Site
from planner.terms import Overlap, PipelineTerms, optimizer_s, partial_grads_s


def first_stage_ends_s(
    prices: Prices,
    stage_sites: Sequence[Site],
    device: tuple[str, float],
    units: UnitPrices,
    terms: PipelineTerms,
    *,
    zero: int,
    most: int,
) -> Floats:
    """[b] -> seconds at both ends of the step if stage 0 holds units [0, b), b up to ``most``; entry 0 is that of b = 1. (most + 1)

    Before: waiting for the first unit's weights. After: reductions that only then can run, sums over tp, tied gradients, the
    optimizer.
    """
    kind, first = prices.kind_of_unit[:most], prices.first_kind
    site = stage_sites[0]
    reduce_s = np.cumsum(np.broadcast_to(terms.reduce_s, units.forward_s.shape)[kind])
    backward_s = np.cumsum(np.broadcast_to(terms.backward_s, units.forward_s.shape)[kind])
    partial = partial_grads_s(prices, site, np.cumsum(units.partial_grad_elements[kind])) + tied_grads_s(
        prices, site, stage_sites[-1].first_device
    )
    sizes = prices.sizes(site)
    local = np.cumsum((sizes.trainable * sizes.state_share(site, zero))[kind])
    optimizer = np.array([optimizer_s(prices, device, float(value)) for value in local])
    if zero == 0 or prices.rules.reduce_inline:  # on the compute queue, one after another
        after = reduce_s + partial
    else:
        last = reduce_s[0]
        exposed = Overlap.of(prices.rules, site.dp_shape.tier).least_s(backward_s, reduce_s - last) - backward_s
        after = np.maximum(last + exposed, partial)
    ends = float(terms.wait_s[first]) + after + optimizer
    return np.concatenate([ends[:1], ends])


def tied_grads_s(prices: Prices, site: Site, last_first_device: int) -> float:
    """Summing the gradients of a parameter that the first stage, on ``site``, and the last one, with that first device, hold."""
    model = prices.model
    if not model.graph.tied or site.first_device == last_first_device:
        return 0.0
    split = site.split
    params = model.params(prices.kinds[prices.first_kind][0], site.tp_shape.size, split.ep, whole_experts=split.whole_experts)
    elements = params.tied_alias or params.trainable
    shape = model.network.shape((site.first_device, last_first_device))
    return model.network.collective("all_reduce", elements * model.state_bytes_per_param[1], shape).seconds
