"""The checks of the small course; `tests/labs/conftest.py` puts this folder among those of ftlab.grading."""
