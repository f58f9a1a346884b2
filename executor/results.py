"""From the ranks' results to one measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from executor.job import Job, RankResult, rank_measurement
from specs.measurement import Measurement
from specs.profile import Profile
from specs.terms import TIME_TERMS

KEPT_FRACTION = 0.5


def measurement_of(job: Job, results: Sequence[RankResult], profile: Profile | None, flags: Sequence[str]) -> Measurement:
    """Join the ranks. A step takes as long as on its slowest rank; terms are means over the middle half of the steps by time, so
    that a disturbed step does not colour them, and then over ranks."""
    step_times = [max(times) for times in zip(*([step.step_time_s for step in item.steps] for item in results), strict=True)]
    kept = middle_steps(step_times)
    rank_terms = [_mean_terms(item, kept) for item in results]
    devices = [device for grid in job.plan.pipelines[0].ranks() for device in grid]
    median = statistics.median(step_times)
    tokens = job.plan.global_batch * job.plan.seq_len
    return Measurement(
        plan_hash=job.plan.content_hash(),
        plan=job.plan,
        model_hash=job.graph.content_hash(),
        workload=job.workload,
        cluster=profile.cluster if profile is not None else "",
        steps=job.steps,
        warmup_steps=job.warmup_steps,
        step_times_s=tuple(step_times),
        step_time_s=median,
        step_time_p10_s=quantile(step_times, 0.1),
        step_time_p90_s=quantile(step_times, 0.9),
        tokens_per_s=tokens / median,
        peak_memory_bytes=max(item.peak_memory_bytes for item in results),
        losses=results[0].losses,
        waterfall={term: statistics.fmean(terms[term] for terms in rank_terms) for term in TIME_TERMS},
        ranks=tuple(
            rank_measurement(item, terms, f"device {device}")
            for item, terms, device in zip(results, rank_terms, sorted(devices), strict=True)
        ),
        start_drift=_drift([item.start_probe_s for item in results], profile),
        drift=_drift([item.probe_s for item in results], profile),
        collectives=_traffic(results, kept),
        environment={
            "backend": job.backend,
            "pinned": job.pin,
            "flags": list(flags),
            "warmup_peak_memory_bytes": max(item.warmup_peak_memory_bytes for item in results),
            **results[0].environment,
        },
    )


def middle_steps(step_times: Sequence[float]) -> list[int]:
    """Indices of the middle half of the steps by time (at least one)."""
    order = sorted(range(len(step_times)), key=lambda index: step_times[index])
    count = max(1, round(len(order) * KEPT_FRACTION))
    first = (len(order) - count) // 2
    return sorted(order[first : first + count])


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear between the order statistics."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _mean_terms(result: RankResult, kept: Sequence[int]) -> dict[str, float]:
    return {term: statistics.fmean(result.steps[index].terms[term] for index in kept) for term in TIME_TERMS}


def _drift(rank_probes_s: Sequence[float | None], profile: Profile | None) -> float | None:
    """Probe time of this run over the profile's; with several device types over their mean."""
    probes = [seconds for seconds in rank_probes_s if seconds is not None]
    reference = [device.probe_s.median_s for device in (profile.devices if profile else ()) if device.probe_s is not None]
    if not probes or not reference:
        return None
    return statistics.median(probes) / statistics.fmean(reference)


def _traffic(results: Sequence[RankResult], kept: Sequence[int]) -> dict[str, dict[str, float]]:
    """Mean calls and bytes per rank and step by ``axis.op``; bytes of the full tensor of each call."""
    kinds = sorted({kind for item in results for step in item.steps for kind in step.traffic})
    samples = [item.steps[index].traffic for item in results for index in kept]
    return {
        kind: {
            "calls": statistics.fmean(sample.get(kind, (0, 0))[0] for sample in samples),
            "bytes": statistics.fmean(sample.get(kind, (0, 0))[1] for sample in samples),
        }
        for kind in kinds
    }
