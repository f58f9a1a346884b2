"""simulator of Meshwright (see docs/architecture.md)."""
