"""Imports of the fork server, from which all lanes are forked: torch, PyG, all a lane needs.

Service managers send SIGTERM to every process of a service, and a terminal that is closed SIGHUP.
Only the main process acts on them: lanes and their fork server must live until what was accepted is
answered.
"""

import gc
import os
import warnings

import numpy as np

from serve.ipc.child_signals import hear_only_of_ends
from serve.ipc.orphans import adopt_orphans, end_children_at_exit
from serve.ipc.signals import ignore_left_to_main
from serve.lane.light_imports import imported_lightly
from serve.lane.patient_fork import fork_patiently

with imported_lightly():
    from serve.lane import processor as processor
    from serve.models import zoo as zoo

adopt_orphans()
end_children_at_exit()
fork_patiently()
# The fork server sets its handler after this.
os.register_at_fork(before=hear_only_of_ends)
# Python's own generator does so by itself; lanes would draw the same numbers from numpy's.
os.register_at_fork(after_in_child=np.random.seed)
# It tells of each orphan that ends.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected")
ignore_left_to_main()

# A collection writes to each object that it looks at: lanes would get copies of all those pages.
gc.collect()
gc.freeze()
