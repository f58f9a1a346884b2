"""executor of Meshwright (see docs/architecture.md)."""
