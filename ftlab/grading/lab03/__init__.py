"""Lab 03, recovery: what to do about failures, and a training loop that mends itself."""
