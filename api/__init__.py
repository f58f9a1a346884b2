"""api of Meshwright (see docs/architecture.md)."""
