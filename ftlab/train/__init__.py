"""The student's loop: the train context, and the worker process it runs in."""
