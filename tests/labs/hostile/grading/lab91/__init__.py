"""The checks of a lab for submissions that mean harm; they exist on the grader's side only."""
