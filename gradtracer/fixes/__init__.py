"""Fixes, one a file: parameters, safety, apply and undo. Importing the package registers them all."""

from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, ReportingUndo, SnapshotInfo, Undo, get_fix

FIXES.load(__name__)

__all__ = ["FIXES", "Fix", "FixParameters", "LiveRun", "ReportingUndo", "SnapshotInfo", "Undo", "get_fix"]
