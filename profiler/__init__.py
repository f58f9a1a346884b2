"""profiler of Meshwright (see docs/architecture.md)."""
