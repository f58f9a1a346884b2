"""Measures the devices that are here: ``local_cluster`` describes them, ``profile_cluster`` times a model's ops on them."""

from profiler.measure.cluster import local_cluster
from profiler.measure.profile import profile_cluster

__all__ = ["local_cluster", "profile_cluster"]
