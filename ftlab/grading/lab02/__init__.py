"""Lab 02, detection: a health monitor and a heartbeat detector, on a clock that the checks hold in their hands."""
