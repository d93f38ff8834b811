"""Is it alive, and does it get on? Detectors that look at evidence and return verdicts."""
