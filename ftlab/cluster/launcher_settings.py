"""Names that a cluster and its launcher agree on, apart from the launcher's heavy imports."""

SETTINGS = "settings.json"
SOCKET = "launcher.sock"
CONTROLLER = "controller.sock"  # where clients find the controller
DETECTOR = "detector.pickle"  # of the owner's own, beside them
