"""For tests, ours and yours: a simulated disk and clock, and examiners that hold an implementation to its Protocol."""

from pushrep.testing.filesystem_examiner import RealIntruder, examine_filesystem
from pushrep.testing.simulated_disk import PowerLost, SimulatedClock, SimulatedDisk

__all__ = ["PowerLost", "RealIntruder", "SimulatedClock", "SimulatedDisk", "examine_filesystem"]
