"""Estimates of a request before it runs: memory, time and the room its answer needs.

Pure arithmetic on numbers: ``calibration`` holds them, ``memory`` and ``timing`` fit them to
measurements, ``correction`` follows the machine, ``estimator`` answers. The measuring itself
needs torch and a clock and is elsewhere: see ``serve.lane.measure.calibrate``.
"""

from serve.estimate.calibration import Calibration
from serve.estimate.estimator import Breakdown, ModelEstimator, Overhead
from serve.estimate.slowdown import SlowdownEstimator

__all__ = ["Breakdown", "Calibration", "ModelEstimator", "Overhead", "SlowdownEstimator"]
