"""Text of others on this terminal."""


def printable(text: str) -> str:
    """Names of files and errors are the student's: they must not steer this terminal, nor stop us from printing."""
    return "".join(each if each.isprintable() else "?" for each in text)
