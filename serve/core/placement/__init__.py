"""Where the tasks of a distributed job run, and when they send what to each other.

After Luo, Bao and Wu, "Optimizing Task Placement and Online Scheduling for Distributed GNN Training
Acceleration in Heterogeneous Systems" (DGTP), with what is wrong in its algorithms corrected:

- ``feasible``: a first placement (its IFS);
- ``play``, ``sharing``: the run of a placed job, and how flows share the network (its OES);
- ``critical``: what bounds a run from above and from below;
- ``search``: the search for a better placement (its ETP);
- ``training``: the job that the paper places;
- ``serving``, ``queueing``: stores, samplers and lanes that answer requests, and how many of these
  will be late.
"""
