"""planner of Meshwright (see docs/architecture.md)."""
