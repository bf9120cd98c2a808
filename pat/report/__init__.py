"""The report stage: one page and one JSON file that say whether PAT paid off in an experiment."""

from pat.report.page import run

__all__ = ["run"]
