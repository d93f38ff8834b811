"""The policy, where the design names it: the controller's decisions are `ftlab.policy`'s, which workers ask as well."""

from ftlab.policy import Abort as Abort
from ftlab.policy import Action as Action
from ftlab.policy import Failure as Failure
from ftlab.policy import Policy as Policy
from ftlab.policy import Snapshot as Snapshot
from ftlab.policy import decide as decide
