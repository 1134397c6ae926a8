"""Audits, one a file: what numbers alone don't show. Importing the package registers them all."""

from gradtracer.training.audits.base import AUDITS, INPUT, LOSS, Audit, AuditContext, finding

AUDITS.load(__name__)

__all__ = ["AUDITS", "INPUT", "LOSS", "Audit", "AuditContext", "all_audits", "finding"]


def all_audits() -> list[Audit]:
    """A fresh instance of every audit, for one run."""
    return [cls() for cls in AUDITS]
