"""The command line: `ftlab` prints for people, and one JSON object with `--json`."""
