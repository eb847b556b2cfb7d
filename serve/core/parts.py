"""Parts of one device's scheduler, in one place for everything that works on them."""

from dataclasses import dataclass

from serve.core.disciplines import Discipline, get_discipline
from serve.core.jobs.jobs import TrainingJobs
from serve.core.lifecycle import Cause
from serve.core.params import SchedulerParams
from serve.core.planner import Planner
from serve.core.policies import Policy, get_policy
from serve.core.rules.own_lanes import OwnLanes
from serve.core.rules.recycling import Recycling
from serve.core.rules.reserved import ReservedPart
from serve.core.rules.watch import Watch
from serve.core.rules.window import Window, make_window
from serve.core.state.backlog import Backlog
from serve.core.state.device_state import Board
from serve.core.state.plan import Plan
from serve.core.state.record import Run
from serve.core.state.shared_counts import Totals
from serve.core.state.tasks import Tasks
from serve.core.types import LaneId, TaskId


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """State and rules of one device. Only its ``Scheduler`` and a ``Fleet`` change them."""

    params: SchedulerParams
    totals: Totals
    policy: Policy
    discipline: Discipline
    window: Window
    plan: Plan
    board: Board
    backlog: Backlog
    tasks: Tasks
    planner: Planner
    recycling: Recycling
    reserved: ReservedPart
    watch: Watch
    own_lanes: OwnLanes
    jobs: TrainingJobs

    def run_of(self, task_id: TaskId, lane_id: LaneId, cause: Cause) -> Run:
        """Return the run that the task names; raise InvariantViolation if it is not on the lane."""
        run = self.board.busy.get(lane_id)
        if run is not None and run.task_id == task_id:
            return run
        run = self.tasks.get(task_id, cause).run
        where = "on no lane" if run is None else f"on lane {run.lane_id}"
        if run is not None and run.task_id != task_id:
            where += f" with task {run.task_id}"
        what = f"{cause.__name__} from lane {lane_id} while {where}"
        raise self.tasks.violation(task_id, what)


def make_parts(params: SchedulerParams, totals: Totals) -> SchedulerParts:
    """Build the parts for `params.device`; `totals` may be shared with other devices."""
    policy = get_policy(params.policy)
    discipline = get_discipline(params.discipline)
    window = make_window(params.window, params.window_ns)
    plan = Plan(discipline.holds_groups)
    board = Board(params.device, plan, policy)
    backlog = Backlog(policy, sealing=not window.replans)
    totals.add_board(board)
    tasks = Tasks(backlog, plan, totals)
    planner = Planner(params, policy, discipline, window, backlog, board, tasks, totals.quarantine)
    recycling = Recycling(params.device.lane_limit_bytes, params.device.lane_requests)
    reserved = ReservedPart(is_there=params.device.has_reserved_part)
    watch = Watch(board, params.run_limit_ns)
    own_lanes = OwnLanes(board, params.device.lane_ids, recycling)
    jobs = TrainingJobs(params.jobs, board, window)
    return SchedulerParts(
        params, totals, policy, discipline, window, plan, board, backlog, tasks, planner,
        recycling, reserved, watch, own_lanes, jobs,
    )  # fmt: skip
