"""Every metric of ftlab, once: events in, Prometheus text out."""

from ftlab.metrics.exporter import Exporter

__all__ = ["Exporter"]
