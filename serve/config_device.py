"""The section of the configuration about devices and their lanes, see ``config``."""

from typing import Annotated, Literal

from msgspec import Meta

from serve.niceness import IDLE_CLASS
from serve.toml_tables import Count, Section
from serve.units import parse_bytes


class DeviceConfig(Section, frozen=True):
    """Section `[device]`: the devices that lanes run on, and their share of them."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    #: Memory for weights and running tasks; None: the device's memory less a reserve. On a
    #: processor the limits of the server's control groups count too.
    memory_budget: str | None = None
    #: Lanes of each device, processes that wait for requests to run; None: by the number of cores,
    #: or the CPU quota if that is smaller. On a GPU at most 28.
    lanes: Count | None = None
    #: Memory that a lane's process may hold between runs beyond its models. A lane that holds more,
    #: because a model leaks, is restarted. None: the heap that a lane retains, plus its share of a
    #: quarter of the budget (at least 128 MiB). Does not apply to lanes on a GPU.
    max_lane_memory: str | None = None
    #: Requests after which a lane's process is restarted, whatever it holds. None: at no number.
    #: Does not apply to lanes on a GPU.
    max_lane_requests: Count | None = None
    #: Niceness of lanes that compute; 0 shares cores evenly. With 20, beyond every niceness, they
    #: are in the kernel's idle class: a thread of the server or of another program that wakes takes
    #: their core at once, whereas it may wait a millisecond or two for a lane of niceness 19.
    lane_niceness: Annotated[int, Meta(ge=0, le=IDLE_CLASS)] = IDLE_CLASS
    #: Whether models may open network connections. Does not apply to lanes on a GPU.
    lane_network: Literal["off", "on"] = "off"
    #: Whether models may start processes. Does not apply to lanes on a GPU.
    lane_processes: Literal["off", "on"] = "off"
    #: Files that models may use. `limited`: they read what the server's user may, but not the
    #: server's own files and the folders of models of other trust domains, and write to their own
    #: temporary folder and `lane_writes` alone. `all`: as the server's user. Does not apply to
    #: lanes on a GPU.
    lane_files: Literal["limited", "all"] = "limited"
    #: Disk that the temporary files of a lane may take; one that takes more is restarted. Does not
    #: apply to lanes on a GPU.
    max_lane_files: str = "1 GiB"
    #: Folders that models may write to, too.
    lane_writes: tuple[str, ...] = ()
    #: Capture and replay runs on a GPU whose shapes recur; `auto`: where it is faster.
    cuda_graphs: Literal["auto", "off"] = "auto"
    #: Multiprocessors of a GPU that long runs stay off while short ones are in sight; 0 for none.
    #: The driver rounds up, to 8 on an H200, which has 132. Does not apply to a processor.
    reserved_sms: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    #: GPUs to serve on, by CUDA's numbers; None: all that are of the first one's model.
    gpus: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] | None = None

    @property
    def memory_budget_bytes(self) -> int | None:
        """`memory_budget` in bytes, None when left to the device."""
        if self.memory_budget is None:
            return None
        return parse_bytes(self.memory_budget, "device.memory_budget")

    @property
    def max_lane_memory_bytes(self) -> int | None:
        """`max_lane_memory` in bytes, None when left to the device."""
        if self.max_lane_memory is None:
            return None
        return parse_bytes(self.max_lane_memory, "device.max_lane_memory")

    @property
    def max_lane_files_bytes(self) -> int:
        """`max_lane_files` in bytes."""
        return parse_bytes(self.max_lane_files, "device.max_lane_files")
