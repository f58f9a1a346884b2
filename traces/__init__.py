"""traces of Meshwright (see docs/architecture.md)."""
