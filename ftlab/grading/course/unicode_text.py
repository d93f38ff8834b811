"""Text that can be written as UTF-8: JSON and Python know halves of characters (lone surrogates), files do not."""

from __future__ import annotations

from typing import Any


def writable(data: Any) -> Any:
    """The same text, or JSON data, with a sign for each half character; two that belong together become one."""
    if isinstance(data, str):
        return data if data.isascii() else data.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(data, dict):
        return {writable(key): writable(each) for key, each in data.items()}
    return [writable(each) for each in data] if isinstance(data, list) else data
