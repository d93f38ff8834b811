"""Lab 00, first contact: recorded runs, and checks on how they were read."""
