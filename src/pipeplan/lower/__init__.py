"""From a schedule to programs: communication put in and ordered so that it cannot deadlock."""

from pipeplan.lower.programs import programs

__all__ = ["programs"]
