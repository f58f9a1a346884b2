"""A plan in other frameworks' own words; what a target cannot express is refused by name."""

from planner.exporters.export import export_plan

__all__ = ["export_plan"]
