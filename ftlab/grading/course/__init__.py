"""The course around the labs: `solutions/` are authored, `labs/` generated, students submit, instructors collect.

Notebooks are data here. Only `running` executes one, in a kernel of its own; nothing in this room unpickles anything.
"""
